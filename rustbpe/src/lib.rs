//! Byte pair encoding: learn merges from texts, then encode and decode with them.
//!
//! A text is cut into pieces (`split`, by hand in `scan` with `classes`, else by a regular expression). Training counts
//! the pieces (`count`, by threads in `feed`), lays them out (`words`) and merges pairs (`train`, `neighbours`).
//! Encoding looks pieces up (`cache`, `store`, `key`) or finds their tokens (`encode`, `vocabulary`, `trie`, `borders`); `model` is the whole.
//!
//! All of that knows no Python and reports every mistake as an [`Error`]. The binding (`py` and its parts; feature
//! `python`) only converts arguments, results and errors.

mod borders;
mod cache;
mod classes;
mod count;
mod encode;
mod error;
mod feed;
mod key;
mod model;
mod neighbours;
mod prefetch;
mod scan;
mod split;
mod store;
mod threads;
mod train;
mod trie;
mod vocabulary;
mod words;

#[cfg(feature = "python")]
mod py;
#[cfg(feature = "python")]
mod py_input;
#[cfg(feature = "python")]
mod py_output;
#[cfg(feature = "python")]
mod py_train;
#[cfg(test)]
mod testing;

pub use count::PieceCounts;
pub use error::Error;
pub use feed::{Batch, Failure, Feed};
pub use model::{Encoded, Model, CACHE_BYTES};
pub use split::{Splitter, GPT4_PATTERN};
pub use threads::threads;
pub use train::train;
pub use vocabulary::Vocabulary;

/// The first 256 ids are the byte values; merged tokens follow in the order they were learned.
pub const BYTES: u32 = 256;
/// The largest vocabulary: the trainer keeps one bit of a symbol for itself.
pub const MAX_VOCAB_SIZE: u32 = (1 << 31) - 1;

/// Two neighbouring tokens.
pub type Pair = (u32, u32);

/// A pair as one number that sorts like the pair.
#[inline]
fn key((left, right): Pair) -> u64 {
    (u64::from(left) << 32) | u64::from(right)
}

/// The pair of a [`key`].
#[inline]
fn pair(key: u64) -> Pair {
    ((key >> 32) as u32, key as u32)
}
