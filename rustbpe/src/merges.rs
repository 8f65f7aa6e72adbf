//! The merges by the pairs that they merge, and which tokens they allow beside each other.

use crate::borders::Filter;
use crate::key::fold;
use crate::trie::NONE;
use crate::{key, Pair, BYTES};

/// Bits of the filter that rules out most pairs that are never merged, for each merge.
const FILTER_BITS: usize = 16;
/// In a table of merged tokens: no token. Token 0 is a byte. An array of zeros costs nothing until it is written to.
const FREE: u32 = 0;

pub struct Merges {
    /// The pair that each token is made of. For a byte, the byte itself, twice.
    parts: Vec<Pair>,
    /// A hash table of merged tokens: each is in the first place that was FREE at or after the hash of its pair. At
    /// least half of its places are free.
    places: Vec<u32>,
    /// The hashes of all pairs in `places`.
    filter: Filter,
    /// The token that each two bytes merge to, or FREE.
    of_bytes: Vec<u32>,
}

impl Merges {
    /// No merges yet, and room for those of a vocabulary of this size.
    pub fn new(vocab_size: usize) -> Self {
        let mut parts = Vec::with_capacity(vocab_size);
        parts.extend((0..BYTES).map(|byte| (byte, byte)));
        let places = vec![FREE; (2 * vocab_size).next_power_of_two()];
        Self { parts, places, filter: Filter::new(FILTER_BITS * vocab_size), of_bytes: vec![FREE; 1 << 16] }
    }

    /// Add the merge of two known tokens, which makes the next token.
    pub fn add(&mut self, left: u32, right: u32) {
        let hash = hash(left, right);
        self.filter.add(hash);
        let mask = self.places.len() - 1;
        let mut place = hash as usize & mask;
        while self.places[place] != FREE {
            place = (place + 1) & mask;
        }
        self.places[place] = self.parts.len() as u32;
        if left.max(right) < BYTES {
            self.of_bytes[(left << 8 | right) as usize] = self.parts.len() as u32;
        }
        self.parts.push((left, right));
    }

    /// The pair that each token after the bytes is made of.
    pub fn pairs(&self) -> &[Pair] {
        &self.parts[BYTES as usize..]
    }

    /// The token that these two tokens merge to, or NONE.
    #[inline]
    pub fn made(&self, left: u32, right: u32) -> u32 {
        let hash = hash(left, right);
        if !self.filter.may_have(hash) {
            return NONE;
        }
        let mut place = hash as usize & (self.places.len() - 1);
        loop {
            match self.places[place] {
                FREE => return NONE,
                id if self.parts[id as usize] == (left, right) => return id,
                _ => {}
            }
            place = (place + 1) & (self.places.len() - 1);
        }
    }

    /// Append the tokens of a piece of at most `MOST` bytes, by merging its pairs in the order they were learned. The
    /// time is quadratic, but for a short piece nothing is faster.
    pub fn merge<const MOST: usize>(&self, piece: &[u8], tokens: &mut Vec<u32>) {
        let mut number = piece.len();
        let (mut ids, mut made) = ([0; MOST], [NONE; MOST]); // made[i]: what ids[i] and ids[i + 1] merge to
        for (id, &byte) in ids.iter_mut().zip(piece) {
            *id = byte.into();
        }
        for (made, pair) in made.iter_mut().zip(piece.windows(2)) {
            let id = self.of_bytes[usize::from(pair[0]) << 8 | usize::from(pair[1])];
            *made = if id == FREE { NONE } else { id };
        }
        loop {
            let (mut earliest, mut at) = (NONE, 0);
            for (index, &id) in made[..number].iter().enumerate() {
                if id < earliest {
                    (earliest, at) = (id, index);
                }
            }
            if earliest == NONE {
                break;
            }
            ids[at] = earliest;
            ids.copy_within(at + 2..number, at + 1);
            made.copy_within(at + 1..number, at);
            number -= 1;
            if at + 1 < number {
                made[at] = self.made(earliest, ids[at + 1]);
            }
            if at > 0 {
                made[at - 1] = self.made(ids[at - 1], earliest);
            }
        }
        tokens.extend_from_slice(&ids[..number]);
    }

    /// Whether these two tokens can be neighbours, whatever the text around them.
    ///
    /// This follows the border between the tokens back in time. The newer of the two was made last; before that, one of
    /// its halves was at the border. A merge across the border would have happened if it was learned before the merge
    /// that changed one of the two tokens beside it. Two equal tokens come from the same merge, which works from left
    /// to right, so the left one was made first.
    #[inline]
    pub fn may_meet(&self, mut left: u32, mut right: u32) -> bool {
        let mut end = NONE; // merges from this number on came too late for the two tokens at the border
        loop {
            if self.made(left, right) < end {
                return false;
            }
            if left.max(right) < BYTES {
                return true;
            }
            if left > right {
                end = left;
                left = self.parts[left as usize].1;
            } else {
                end = right + 1;
                right = self.parts[right as usize].0;
            }
        }
    }
}

/// Remembers which pairs of tokens may meet.
pub struct Meetings(Vec<u64>);

/// How many pairs are remembered.
const MEETINGS: usize = 1 << 13;
const MAY_MEET: u64 = 1 << 63;

impl Meetings {
    pub fn new() -> Self {
        Self(vec![0; MEETINGS]) // 0 is also the key of the pair of the tokens 0 and 0, which is never taken from here
    }

    #[inline]
    pub fn may_meet(&mut self, merges: &Merges, (left, right): Pair) -> bool {
        let pair = key((left, right));
        let known = &mut self.0[hash(left, right) as usize % MEETINGS];
        if *known & !MAY_MEET != pair || pair == 0 {
            *known = pair | if merges.may_meet(left, right) { MAY_MEET } else { 0 };
        }
        *known & MAY_MEET != 0
    }
}

/// The hash of a pair. All bits of both tokens affect its low bits.
#[inline]
fn hash(left: u32, right: u32) -> u64 {
    fold(key((left, right)) ^ 0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93)
}
