//! Byte pair encoding: learns merges from texts, then encodes and decodes with them.
//!
//! `split` splits a text into pieces: `scan`, with `block` and `classes`, does so for the patterns that are written out
//! by hand, and a regular expression engine does so for all others. Training counts the pieces (`count`, on threads in
//! `feed`), lays them out in memory (`words`) and merges pairs (`train`, `neighbours`). Encoding looks pieces up in a
//! cache (`cache`, `store`, `key`) or works out their tokens (`encode`, `vocabulary`, `tokens`, `index`, `merges`, `trie`,
//! `borders`). `model` puts
//! everything together.
//!
//! None of this knows Python, and every mistake is reported as an [`Error`]. The binding (`py` and the files that begin
//! with `py_`; feature `python`) only converts arguments, results and errors.

mod block;
mod borders;
mod cache;
mod classes;
mod count;
mod encode;
mod error;
mod feed;
mod index;
mod key;
mod merges;
mod model;
mod neighbours;
mod prefetch;
mod scan;
mod split;
mod store;
mod threads;
mod tokens;
mod train;
mod trie;
mod vocabulary;
mod words;

#[cfg(feature = "python")]
mod py;
#[cfg(feature = "python")]
mod py_input;
#[cfg(feature = "python")]
mod py_list;
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
pub use tokens::Tokens;
pub use train::train;
pub use vocabulary::Vocabulary;

/// The first 256 ids are the byte values. Merged tokens follow in the order they were learned.
pub const BYTES: u32 = 256;
/// The largest vocabulary. The trainer needs one bit of each symbol as a mark.
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
