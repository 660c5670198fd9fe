//! What matching costs: nanoseconds a node, for a new graph and for a known one.

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use ggml_flashrt::graph::OwnedGraph;
use ggml_flashrt::window::engine::Engine;
use ggml_flashrt::window::match_graph;
use ggml_flashrt::window::settings::Settings;
use ggml_flashrt::window::thresholds::Thresholds;

#[path = "../tests/support/mod.rs"]
mod support;

use support::machine::{FakeDevice, Memory};
use support::model::{model, on_an_rpc_server, Family, Shape};

fn matching(c: &mut Criterion) {
    for family in [Family::Llama, Family::Gemma3, Family::Qwen3] {
        let record = model(Shape {
            n_layers: 32,
            ..Shape::small(family)
        });
        let graph = OwnedGraph::new(&record).expect("a whole graph");
        let mut group = c.benchmark_group(format!("{family:?}"));
        group.throughput(Throughput::Elements(record.nodes.len() as u64));
        group.bench_function("match", |b| {
            b.iter(|| {
                match_graph(graph.graph(), graph.host(), Thresholds::default(), |_| true)
                    .sites
                    .len()
            })
        });
        let served = OwnedGraph::new(&on_an_rpc_server(record.clone())).expect("the same");
        group.bench_function("match without weights buffers", |b| {
            b.iter(|| {
                match_graph(served.graph(), served.host(), Thresholds::default(), |_| true)
                    .sites
                    .len()
            })
        });

        // Scratch addresses only: nothing is launched.
        let device = FakeDevice::new(Memory::for_graph(&model(Shape::tiny(family)), 1));
        let engine = Engine::new(Settings::from_vars([]), Box::new(device));
        group.bench_function("known by uid", |b| {
            b.iter(|| {
                engine.eval_begin(&graph.host(), graph.graph());
                engine.eval_end(&graph.host())
            });
        });
        let unnamed = OwnedGraph::new(&ggml_flashrt::graph::dump::GraphRecord {
            uid: 0,
            ..record.clone()
        })
        .expect("the same");
        group.bench_function("known by content", |b| {
            b.iter(|| {
                engine.eval_begin(&unnamed.host(), unnamed.graph());
                engine.eval_end(&unnamed.host())
            });
        });
        group.finish();
    }
}

criterion_group!(benches, matching);
criterion_main!(benches);
