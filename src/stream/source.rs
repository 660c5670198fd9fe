//! Where in a model's files its tensors and experts lie.
//!
//! A model may come in shards. The files stay open, so that what is read later is what the headers described, also when the
//! path has been given to another file since.

use crate::gguf::{Gguf, GgufError, Tensor};
use crate::graph::DType;
use serde::Serialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum SourceError {
    #[error("{path}: {source}", path = path.display())]
    Gguf { path: PathBuf, source: GgufError },
    #[error("{path}: {source}", path = path.display())]
    Open { path: PathBuf, source: std::io::Error },
    #[error("{path} is shard {number} of {count}: name the first one", path = path.display())]
    NotFirst { path: PathBuf, number: u64, count: u64 },
    #[error("{path} is one of {count} shards, but is not called …-00001-of-{count:05}.gguf", path = path.display())]
    ShardName { path: PathBuf, count: u64 },
    #[error("{path}: its header says shard {found:?}, but by its name it is {expected:?}", path = path.display())]
    ShardNumber {
        path: PathBuf,
        expected: (u64, u64),
        found: (Option<u64>, Option<u64>),
    },
    #[error("the shards have {found} tensors, but the first says {stated}")]
    TensorCount { stated: u64, found: u64 },
    #[error("tensor {tensor:?} is in {first} and in {second}", first = first.display(), second = second.display())]
    Duplicate {
        tensor: String,
        first: PathBuf,
        second: PathBuf,
    },
    #[error("there is no tensor {0:?} in the model")]
    NoTensor(String),
    #[error("tensor {tensor:?} is {in_file} in the file, but {wanted} was asked for")]
    Differs {
        tensor: String,
        in_file: String,
        wanted: String,
    },
    #[error("tensor {tensor:?}: {why}")]
    Experts { tensor: String, why: String },
    #[error("the model has no tensors of routed experts")]
    NoExperts,
    #[error("layer {layer} has {number} experts, there is no {expert}")]
    NoExpert { layer: u32, number: u64, expert: u64 },
}

/// Bytes in one of the model's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    /// Which file, the first is 0.
    pub shard: usize,
    /// First byte.
    pub start: u64,
    /// How many.
    pub bytes: u64,
}

/// One file of a model.
#[derive(Debug)]
pub struct Shard {
    /// Where it was found.
    pub path: PathBuf,
    /// Open for reading.
    pub file: File,
    /// What is in it.
    pub header: Gguf,
}

/// A model: one file, or several shards.
#[derive(Debug)]
pub struct Model {
    shards: Vec<Shard>,
    /// Shard and place in its list of each tensor.
    index: HashMap<String, (usize, usize)>,
}

/// llama.cpp refuses more; as a count in a broken header it would be tried file by file.
const MAX_SHARDS: u64 = 65_535;

impl Shard {
    fn open(path: &Path) -> Result<Shard, SourceError> {
        let at_path = |source| SourceError::Open {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(at_path)?;
        let meta = file.metadata().map_err(at_path)?;
        if !meta.is_file() {
            return Err(at_path(std::io::Error::other("this is no file")));
        }
        let reader = BufReader::with_capacity(1 << 16, &file);
        let header = Gguf::read(reader, meta.len()).map_err(|source| SourceError::Gguf {
            path: path.to_owned(),
            source,
        })?;
        Ok(Shard {
            path: path.to_owned(),
            file,
            header,
        })
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.header.get(key)?.as_u64()
    }
}

impl Model {
    /// Opens the model at `path`: its only file, or the first of its shards, whose others lie beside it.
    pub fn open(path: &Path) -> Result<Model, SourceError> {
        let first = Shard::open(path)?;
        let count = first.number("split.count").unwrap_or(1);
        let number = first.number("split.no").unwrap_or(0);
        if number > 0 {
            return Err(SourceError::NotFirst {
                path: path.to_owned(),
                number: number + 1,
                count,
            });
        }
        let stated = first.number("split.tensors.count");
        let mut shards = vec![first];
        if count > 1 {
            let name = || SourceError::ShardName {
                path: path.to_owned(),
                count,
            };
            let file_name = path.file_name().and_then(|n| n.to_str()).ok_or_else(name)?;
            let stem = file_name.strip_suffix(&format!("-00001-of-{count:05}.gguf"));
            let stem = stem.filter(|_| count <= MAX_SHARDS).ok_or_else(name)?;
            for n in 1..count {
                let shard = Shard::open(&path.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", n + 1)))?;
                let found = (shard.number("split.no"), shard.number("split.count"));
                if found != (Some(n), Some(count)) {
                    return Err(SourceError::ShardNumber {
                        path: shard.path,
                        expected: (n, count),
                        found,
                    });
                }
                shards.push(shard);
            }
        }
        let mut index = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for (t, tensor) in shard.header.tensors.iter().enumerate() {
                if let Some((other, _)) = index.insert(tensor.name.clone(), (s, t)) {
                    return Err(SourceError::Duplicate {
                        tensor: tensor.name.clone(),
                        first: shards[other].path.clone(),
                        second: shard.path.clone(),
                    });
                }
            }
        }
        let found = index.len() as u64;
        match stated {
            Some(stated) if count > 1 && stated != found => Err(SourceError::TensorCount { stated, found }),
            _ => Ok(Model { shards, index }),
        }
    }

    /// The files.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The first file's header, which has the model's metadata.
    pub fn header(&self) -> &Gguf {
        &self.shards[0].header
    }

    /// Every tensor, with its file.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        let shards = self.shards.iter().enumerate();
        shards.flat_map(|(s, shard)| shard.header.tensors.iter().map(move |t| (s, t)))
    }

    /// The bytes of a tensor that a host describes by name, type and extents (four of them, or fewer: the others are 1). One
    /// that the file describes otherwise is refused: its bytes would be taken for something else.
    pub fn locate(&self, name: &str, ty: DType, dims: &[u64]) -> Result<Range, SourceError> {
        let (shard, place) = *self
            .index
            .get(name)
            .ok_or_else(|| SourceError::NoTensor(name.to_owned()))?;
        let tensor = &self.shards[shard].header.tensors[place];
        if tensor.ty != ty || trimmed(&tensor.dims) != trimmed(dims) {
            return Err(SourceError::Differs {
                tensor: name.to_owned(),
                in_file: format!("{} {:?}", tensor.ty.name(), tensor.dims),
                wanted: format!("{} {dims:?}", ty.name()),
            });
        }
        Ok(Range {
            shard,
            start: tensor.start,
            bytes: tensor.bytes,
        })
    }

    /// The routed experts of every layer that has some, in the order of the layers.
    pub fn experts(&self) -> Result<Vec<LayerExperts>, SourceError> {
        let mut layers: Vec<LayerExperts> = Vec::new();
        for (shard, tensor) in self.tensors() {
            let Some((layer, role)) = expert_tensor(&tensor.name) else {
                continue;
            };
            let (part, number) = Part::new(shard, tensor, role)?;
            match layers.iter_mut().find(|l| l.layer == layer) {
                Some(of_layer) if of_layer.number != number => {
                    return Err(SourceError::Experts {
                        tensor: tensor.name.clone(),
                        why: format!(
                            "it has {number} experts, other tensors of the layer {}",
                            of_layer.number
                        ),
                    })
                }
                Some(of_layer) => of_layer.parts.push(part),
                None => layers.push(LayerExperts {
                    layer,
                    number,
                    parts: vec![part],
                }),
            }
        }
        if layers.is_empty() {
            return Err(SourceError::NoExperts);
        }
        layers.sort_by_key(|l| l.layer);
        layers.iter_mut().for_each(|l| l.parts.sort_by_key(|p| p.role));
        Ok(layers)
    }
}

/// Extents without ones at the end.
fn trimmed(dims: &[u64]) -> &[u64] {
    let n = dims.iter().rposition(|d| *d != 1).map_or(0, |at| at + 1);
    &dims[..n]
}

/// What an expert's matrix is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Role {
    Gate,
    Up,
    GateUp,
    Down,
}

/// Layer and role of a tensor with the matrices of all routed experts. Their biases and scales are small and stay resident.
pub fn expert_tensor(name: &str) -> Option<(u32, Role)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let role = match rest {
        "ffn_gate_exps.weight" => Role::Gate,
        "ffn_up_exps.weight" => Role::Up,
        "ffn_gate_up_exps.weight" => Role::GateUp,
        "ffn_down_exps.weight" => Role::Down,
        _ => return None,
    };
    Some((layer.parse().ok()?, role))
}

/// One tensor's share in every expert of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What it is for.
    pub role: Role,
    /// Type.
    pub ty: DType,
    /// Values in a row, and rows, of one expert's matrix.
    pub dims: [u64; 2],
    /// Bytes of one expert's matrix.
    pub bytes: u64,
    shard: usize,
    start: u64,
}

impl Part {
    fn new(shard: usize, tensor: &Tensor, role: Role) -> Result<(Part, u64), SourceError> {
        let refuse = |why: String| SourceError::Experts {
            tensor: tensor.name.clone(),
            why,
        };
        let [row, rows, number] = tensor.dims[..] else {
            return Err(refuse(format!("{:?} is no row of matrices", tensor.dims)));
        };
        if number == 0 || tensor.bytes == 0 || tensor.bytes % number != 0 {
            return Err(refuse(format!("{} bytes are no {number} matrices", tensor.bytes)));
        }
        let part = Part {
            role,
            ty: tensor.ty,
            dims: [row, rows],
            bytes: tensor.bytes / number,
            shard,
            start: tensor.start,
        };
        Ok((part, number))
    }
}

/// The routed experts of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerExperts {
    /// Number of the layer.
    pub layer: u32,
    /// How many experts there are.
    pub number: u64,
    /// The tensors that hold them, by role.
    pub parts: Vec<Part>,
}

impl LayerExperts {
    /// Bytes of one expert: the matrices that a token needs of it.
    pub fn bundle_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }

    /// Where an expert's matrices lie, in the order of the parts.
    pub fn bundle(&self, expert: u64) -> Result<Vec<Range>, SourceError> {
        if expert >= self.number {
            return Err(SourceError::NoExpert {
                layer: self.layer,
                number: self.number,
                expert,
            });
        }
        let range = |p: &Part| Range {
            shard: p.shard,
            start: p.start + expert * p.bytes,
            bytes: p.bytes,
        };
        Ok(self.parts.iter().map(range).collect())
    }

    /// Layers with equal layouts can share slots.
    pub fn layout(&self) -> Vec<(Role, DType, [u64; 2])> {
        self.parts.iter().map(|p| (p.role, p.ty, p.dims)).collect()
    }
}
