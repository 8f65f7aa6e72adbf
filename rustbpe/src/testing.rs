//! Slow and simple references, and random input, for the tests.

use std::collections::BTreeMap;

use crate::Pair;

/// A small random generator (xorshift64*), so that tests repeat exactly.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number from 0 to `end - 1`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }
}

/// Up to `longest` letters of `alphabet`, in runs.
pub fn random_text(random: &mut Random, alphabet: &str, longest: usize) -> String {
    let letters: Vec<char> = alphabet.chars().collect();
    let mut text = String::new();
    let length = random.below(longest + 1);
    while text.chars().count() < length {
        let letter = letters[random.below(letters.len())];
        (0..1 + random.below(6)).for_each(|_| text.push(letter));
    }
    text
}

/// Replace a pair by a token, in one pass from left to right.
fn replace(ids: &[u32], pair: Pair, token: u32) -> Vec<u32> {
    let mut out = Vec::new();
    let mut index = 0;
    while index < ids.len() {
        if index + 1 < ids.len() && (ids[index], ids[index + 1]) == pair {
            out.push(token);
            index += 2;
        } else {
            out.push(ids[index]);
            index += 1;
        }
    }
    out
}

/// Byte pair encoding as a textbook explains it: count all pairs again for each merge.
pub fn naive_merges(pieces: &[(&str, u64)], wanted: usize) -> Vec<Pair> {
    let bytes = |piece: &str| piece.bytes().map(u32::from).collect();
    let mut words: Vec<(Vec<u32>, u64)> = pieces.iter().map(|(piece, count)| (bytes(piece), *count)).collect();
    let mut merges = Vec::new();
    while merges.len() < wanted {
        let mut counts: BTreeMap<Pair, u64> = BTreeMap::new();
        for (ids, count) in &words {
            ids.windows(2).for_each(|pair| *counts.entry((pair[0], pair[1])).or_default() += count);
        }
        let best = counts.iter().max_by_key(|(pair, count)| (**count, std::cmp::Reverse(**pair)));
        let Some((&best, _)) = best else { break };
        let token = 256 + merges.len() as u32;
        words.iter_mut().for_each(|(ids, _)| *ids = replace(ids, best, token));
        merges.push(best);
    }
    merges
}

/// Apply every merge to the whole piece, in the order learned.
pub fn naive_encode(piece: &[u8], merges: &[Pair]) -> Vec<u32> {
    let ids = piece.iter().map(|&byte| byte.into()).collect();
    merges.iter().enumerate().fold(ids, |ids: Vec<u32>, (index, &pair)| replace(&ids, pair, 256 + index as u32))
}
