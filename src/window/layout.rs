//! Where scratch and hand-offs of a plan lie, and which sites have to do without.

use super::hand_off::{edges, Edge, HandOff};
use super::match_graph::{Declined, Matched};
use super::Decline;
use crate::graph::{GraphRef, HostView};

/// Offsets into a plan's block.
pub struct Layout {
    /// By site: its scratch.
    pub scratch: Vec<usize>,
    /// By edge.
    pub edges: Vec<usize>,
    /// Bytes of all.
    pub bytes: usize,
}

/// Something of a size that is needed from one site to another.
struct Piece {
    first: usize,
    last: usize,
    bytes: usize,
}

impl Layout {
    /// The hand-offs of a graph and where they lie, within `limit` bytes: as long as they do not fit, the sites with the largest
    /// pieces are left to stock, so that all layers of a model fare alike. A mat-vec merely loses its hand-off.
    pub fn within(limit: usize, matched: &mut Matched, graph: GraphRef, host: HostView) -> (Vec<Edge>, Layout) {
        let mut largest = limit;
        loop {
            let mut edges = edges(matched, graph, host);
            let mut excluded: Vec<(usize, usize)> = Vec::new();
            for (i, site) in matched.sites.iter().enumerate() {
                excluded.push((i, (site.window().scratch_bytes)(&site.m)));
            }
            for edge in edges.iter().filter(|e| e.form.is_needed()) {
                excluded.extend(edge.consumers.iter().map(|&i| (i, edge.bytes())));
            }
            excluded.retain(|&(_, bytes)| aligned(bytes) > largest);
            if !excluded.is_empty() {
                decline(matched, graph, &excluded, limit);
                continue;
            }
            edges.retain(|e| aligned(e.bytes()) <= largest);
            let pieces = pieces(matched, &edges);
            let layout = Layout::new(&pieces, matched.sites.len());
            if layout.bytes <= limit {
                return (edges, layout);
            }
            largest = pieces
                .iter()
                .map(|p| aligned(p.bytes))
                .max()
                .map_or(0, |n| n - HandOff::ALIGN);
        }
    }

    /// First fit by lifetime: from the run that makes a piece to the last run that reads it.
    fn new(pieces: &[Piece], n_sites: usize) -> Layout {
        let mut placed: Vec<(usize, usize, usize)> = Vec::new();
        let mut offsets = vec![0; pieces.len()];
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|&i| pieces[i].first);
        for i in order {
            let Piece { first, last, bytes } = pieces[i];
            let bytes = aligned(bytes);
            let mut offset = 0;
            placed.retain(|p| p.0 >= first);
            placed.sort_by_key(|p| p.1);
            for &(_, start, end) in &placed {
                if offset + bytes <= start {
                    break;
                }
                offset = offset.max(end);
            }
            offsets[i] = offset;
            if bytes > 0 {
                placed.push((last, offset, offset + bytes));
            }
        }
        let ends = pieces.iter().zip(&offsets).map(|(p, offset)| offset + aligned(p.bytes));
        let bytes = ends.max().unwrap_or(0);
        let edges = offsets.split_off(n_sites);
        Layout {
            scratch: offsets,
            edges,
            bytes,
        }
    }
}

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(HandOff::ALIGN)
}

/// The scratch of each site, then each edge.
fn pieces(matched: &Matched, edges: &[Edge]) -> Vec<Piece> {
    let scratch = matched.sites.iter().enumerate().map(|(i, site)| Piece {
        first: i,
        last: i,
        bytes: (site.window().scratch_bytes)(&site.m),
    });
    let edges = edges.iter().map(|e| Piece {
        first: e.lifetime().start,
        last: e.lifetime().end - 1,
        bytes: e.bytes(),
    });
    scratch.chain(edges).collect()
}

/// Leaves sites, by index and bytes they need, to stock.
fn decline(matched: &mut Matched, graph: GraphRef, excluded: &[(usize, usize)], limit: usize) {
    let mut index = 0;
    let declined = &mut matched.declined;
    matched.sites.retain(|site| {
        let found = excluded.iter().find(|(i, _)| *i == index);
        index += 1;
        if let Some((_, bytes)) = found {
            let detail = format!("{bytes} bytes for it alone, {limit} for all at a time");
            declined.push(Declined {
                window: site.window,
                start: site.m.start,
                node: graph.node(site.m.start).name(),
                decline: Decline::new("scratch limit", detail),
            });
        }
        found.is_none()
    });
}
