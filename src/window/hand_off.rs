//! Hand-offs: the input of a site in another form than the graph has it, made once for all sites that read it.

use super::match_graph::Matched;
use super::KernelCall;
use crate::graph::{GraphRef, HostView, Region, Tensor};
use crate::kernel::{H16Args, MaskTilesArgs, TileGrid, Tiles, H16, Q8};
use std::collections::HashMap;
use std::ops::Range;

/// A form of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// 8-bit blocks for mat-vecs: `frt_q8` in `csrc/flashrt_kernels.h`. A mat-vec that gets none makes them itself.
    Q8,
    /// f16 for tensor cores: `frt_h16`. A mat-mul reads nothing else.
    H16,
    /// Of an attention mask, which of its tiles hide or show everything: `frt_tiles`.
    Tiles(TileGrid),
}

impl Form {
    /// Bytes of `n_tokens` rows of `k` values, without their scales.
    fn values(self, k: usize, n_tokens: usize) -> usize {
        match self {
            Form::Q8 => (k * n_tokens).next_multiple_of(16),
            Form::H16 => H16::bytes(k, n_tokens),
            Form::Tiles(grid) => grid.bytes(),
        }
    }

    /// Bytes of `n_tokens` rows of `k` values.
    pub fn bytes(self, k: usize, n_tokens: usize) -> usize {
        let scales = match self {
            Form::Q8 => k / 32 * n_tokens * 8,
            Form::H16 => n_tokens * 4,
            Form::Tiles(_) => 0,
        };
        self.values(k, n_tokens) + scales
    }

    /// Can its readers not do without?
    pub fn is_needed(self) -> bool {
        self != Form::Q8
    }
}

/// Device memory of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandOff {
    /// What is there.
    pub form: Form,
    /// Where, on [`HandOff::ALIGN`] bytes.
    pub address: usize,
    /// Values of a row.
    pub k: usize,
    /// Rows.
    pub n_tokens: usize,
}

impl HandOff {
    /// Alignment: what `cudaMalloc` gives, and enough for every form.
    pub const ALIGN: usize = 256;

    fn scales(self) -> usize {
        self.address + self.form.values(self.k, self.n_tokens)
    }

    /// As kernels take it, if it has this form.
    pub fn q8(self) -> Option<Q8> {
        (self.form == Form::Q8).then(|| Q8 {
            qs: self.address as _,
            ds: self.scales() as _,
        })
    }

    /// As kernels take it, if it has this form.
    pub fn h16(self) -> Option<H16> {
        (self.form == Form::H16).then(|| H16 {
            x: self.address as _,
            scale: self.scales() as _,
        })
    }

    /// As kernels take it, if it has this form.
    pub fn tiles(self) -> Option<Tiles> {
        match self.form {
            Form::Tiles(grid) => Some(grid.at(self.address)),
            Form::Q8 | Form::H16 => None,
        }
    }

    /// Makes it from the tensor, if a kernel does that.
    pub fn convert(self, x: Tensor) -> Option<KernelCall> {
        match self.form {
            Form::Q8 => None,
            Form::H16 => self.h16().map(|y| {
                KernelCall::ToH16(H16Args {
                    x: x.data() as _,
                    x_stride: super::row_stride(x),
                    y,
                    k: self.k as i32,
                    n_tokens: self.n_tokens as i32,
                })
            }),
            Form::Tiles(grid) => Some(KernelCall::MaskTiles(MaskTilesArgs {
                mask: x.data() as _,
                token_bytes: x.nb()[1] as i64,
                plane_bytes: x.nb()[3] as i64,
                n_planes: grid.n_planes as i32,
                n_tokens: x.ne()[1] as i32,
                n_kv: x.ne()[0] as i32,
                tile_m: grid.tile_m as i32,
                tile_n: grid.tile_n as i32,
                tiles: grid.at(self.address),
            })),
        }
    }
}

/// An input that goes to sites in another form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edge {
    /// The form.
    pub form: Form,
    /// Index of the site that makes it along with its result. Without one, or when that did not fire, the first reader that does
    /// fire converts the f32 result.
    pub producer: Option<usize>,
    /// Indices of the sites that read it, in order.
    pub consumers: Vec<usize>,
    /// Nobody reads the f32 form.
    pub drop_f32: bool,
    /// Values of a row.
    pub k: usize,
    /// Rows.
    pub n_tokens: usize,
}

impl Edge {
    /// Bytes of the hand-off.
    pub fn bytes(&self) -> usize {
        self.form.bytes(self.k, self.n_tokens)
    }

    /// Sites by index that it must be kept for.
    pub fn lifetime(&self) -> Range<usize> {
        let last = *self.consumers.last().expect("somebody reads it");
        self.producer.unwrap_or(self.consumers[0])..last + 1
    }
}

/// The hand-offs between sites. In a graph with concurrent regions nodes may still change order: there, each reader of f16 makes
/// its own, and nobody is handed 8-bit blocks.
pub fn edges(matched: &Matched, graph: GraphRef, host: HostView) -> Vec<Edge> {
    let sites = &matched.sites;
    let ordered = graph.nodes().all(|t| host.region(t) == Region::None);
    let mut producers: HashMap<Tensor, usize> = HashMap::new();
    let mut edges: Vec<Edge> = Vec::new();
    // By input and form: the last edge of that kind, and the node from which on the input's f32 form must not change.
    let mut open: HashMap<(Tensor, Form), (usize, usize)> = HashMap::new();
    // Uses of a producer's result that edges take over.
    let mut taken: HashMap<usize, i32> = HashMap::new();
    for (i, site) in sites.iter().enumerate() {
        if let Some((role, form)) = (site.window().input_form)(&site.m) {
            let x = site.m.tensor(role);
            // No window hands over a mask.
            let of_mask = matches!(form, Form::Tiles(_));
            let producer = producers.get(&x).copied().filter(|_| ordered && !of_mask);
            let known = open.get(&(x, form)).copied();
            let since = known.map(|(_, since)| since).or(producer.map(|p| sites[p].m.end));
            let unchanged = ordered && since.is_some_and(|since| !is_written(x, graph, since..site.m.start));
            let edge = match known.filter(|_| unchanged) {
                Some((edge, _)) => Some(edge),
                None => new_edge(x, form, producer.filter(|_| unchanged)).map(|edge| {
                    edges.push(edge);
                    edges.len() - 1
                }),
            };
            if let Some(e) = edge {
                edges[e].consumers.push(i);
                open.insert((x, form), (e, site.m.start));
                if let Some(producer) = edges[e].producer {
                    let uses = |n: Tensor| n.srcs().filter(|&s| s == x).count() as i32;
                    *taken.entry(producer).or_default() += site.m.nodes().map(|(_, n)| uses(n)).sum::<i32>();
                }
            }
        }
        if let Some(role) = site.window().hands_over {
            producers.insert(site.m.tensor(role), i);
        }
    }
    for edge in &mut edges {
        if let Some(producer) = edge.producer {
            let site = &sites[producer];
            let x = site.m.tensor(site.window().hands_over.expect("it made the edge"));
            edge.drop_f32 = !x.is_output() && taken[&producer] == graph.uses(x);
        }
    }
    edges
}

/// A hand-off of `x` without readers yet, if there can be one.
fn new_edge(x: Tensor, form: Form, producer: Option<usize>) -> Option<Edge> {
    let (k, n_tokens) = (x.ne()[0] as usize, x.n_rows() as usize);
    let possible = match form {
        // Whole blocks, rows of 16 bytes, and somebody who makes them.
        Form::Q8 => producer.is_some() && k % 32 == 0 && n_tokens <= crate::kernel::MAX_TOKENS,
        Form::H16 => k % H16::COLUMNS == 0,
        Form::Tiles(_) => true,
    };
    possible.then(|| Edge {
        form,
        producer,
        consumers: Vec::new(),
        drop_f32: false,
        k,
        n_tokens,
    })
}

/// Does any of these nodes write where `x` lies? An operation in place makes another `x` of it.
fn is_written(x: Tensor, graph: GraphRef, nodes: Range<usize>) -> bool {
    let bytes = x.byte_range();
    nodes.map(|i| graph.node(i)).any(|node| {
        let written = node.byte_range();
        !graph.op(node).is_view() && written.start < bytes.end && bytes.start < written.end
    })
}
