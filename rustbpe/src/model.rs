//! A trained encoding: text to ids and back.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use crate::{key, Error, Pair, Splitter, BYTES};

/// Up to this many bytes a piece is merged by looking for the best pair again and again; above, with a heap.
const SHORT_PIECE: usize = 64;
/// No merge: larger than every id.
const NONE: u32 = u32::MAX;

/// Merges with everything encoding and decoding need. Immutable.
pub struct Model {
    /// None before training.
    splitter: Option<Splitter>,
    merges: HashMap<u64, u32>,
    /// The bytes of all tokens, one after another.
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<usize>,
    /// Tokens by their bytes.
    tokens: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

/// Working memory of one thread's encoding, kept from piece to piece.
#[derive(Default)]
pub struct Scratch {
    ids: Vec<u32>,
    /// By index of `ids`: the token that this id makes with the next one, or NONE.
    made: Vec<u32>,
    previous: Vec<usize>,
    next: Vec<usize>,
    queue: BinaryHeap<Reverse<(u32, usize)>>,
}

impl Model {
    /// The merge at index i makes token 256 + i of two earlier ones.
    pub fn new(splitter: Option<Splitter>, merges: &[Pair]) -> Result<Self, Error> {
        let mut model = Self {
            splitter,
            merges: HashMap::with_capacity(merges.len()),
            bytes: (0..=255).collect(),
            ends: (1..=BYTES as usize).collect(),
            tokens: HashTable::with_capacity(merges.len()),
            hasher: DefaultHashBuilder::default(),
        };
        for (id, &(left, right)) in (BYTES..).zip(merges) {
            let newest = left.max(right);
            if newest >= id {
                return Err(Error::BadMerge { token: newest });
            }
            model.bytes.extend_from_within(model.range(left));
            model.bytes.extend_from_within(model.range(right));
            model.ends.push(model.bytes.len());
            model.merges.insert(key((left, right)), id);
            let Self { tokens, hasher, bytes, ends, .. } = &mut model;
            let of = |id: u32| &bytes[ends[id as usize - 1]..ends[id as usize]];
            tokens.insert_unique(hasher.hash_one(of(id)), id, |&id| hasher.hash_one(of(id)));
        }
        Ok(model)
    }

    /// Byte values and merged tokens.
    pub fn vocab_size(&self) -> u32 {
        self.ends.len() as u32
    }

    /// The split pattern; none before training.
    pub fn pattern(&self) -> Option<&str> {
        self.splitter.as_ref().map(Splitter::pattern)
    }

    /// The bytes of every token, by id.
    pub fn tokens(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.vocab_size()).map(|id| &self.bytes[self.range(id)])
    }

    /// Append the ids of `text` to `ids`.
    pub fn encode(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), Error> {
        let splitter = self.splitter.as_ref().ok_or(Error::Untrained)?;
        let bytes = text.as_bytes();
        splitter.split(text, |start, end| self.encode_piece(&bytes[start..end], scratch, ids))
    }

    /// The bytes of `ids`, one after another; they need not be whole characters.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for (index, &id) in ids.iter().enumerate() {
            if id >= self.vocab_size() {
                return Err(Error::UnknownId { index, id, vocab_size: self.vocab_size() });
            }
            bytes.extend_from_slice(&self.bytes[self.range(id)]);
        }
        Ok(bytes)
    }

    fn range(&self, id: u32) -> std::ops::Range<usize> {
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        start..self.ends[id as usize]
    }

    /// The token that two tokens make, or NONE.
    #[inline]
    fn made(&self, left: u32, right: u32) -> u32 {
        self.merges.get(&key((left, right))).copied().unwrap_or(NONE)
    }

    fn encode_piece(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if let [byte] = piece {
            return ids.push(u32::from(*byte));
        }
        // Merging the bytes of a token always gives that token, and most pieces are one.
        let same = |&id: &u32| &self.bytes[self.range(id)] == piece;
        if let Some(&id) = self.tokens.find(self.hasher.hash_one(piece), same) {
            return ids.push(id);
        }
        scratch.ids.clear();
        scratch.ids.extend(piece.iter().map(|&byte| u32::from(byte)));
        scratch.made.clear();
        scratch.made.extend(scratch.ids.windows(2).map(|pair| self.made(pair[0], pair[1])));
        scratch.made.push(NONE);
        if piece.len() <= SHORT_PIECE {
            self.merge_short(scratch);
            ids.extend_from_slice(&scratch.ids);
        } else {
            self.merge_long(scratch, ids);
        }
    }

    /// Merge the earliest-learned pair, of equals the leftmost, until none is left.
    fn merge_short(&self, Scratch { ids, made, .. }: &mut Scratch) {
        while let Some((index, &token)) = made.iter().enumerate().min_by_key(|(_, token)| **token) {
            if token == NONE {
                break;
            }
            ids[index] = token;
            ids.remove(index + 1);
            made.remove(index + 1);
            made[index] = ids.get(index + 1).map_or(NONE, |&right| self.made(token, right));
            if index > 0 {
                made[index - 1] = self.made(ids[index - 1], token);
            }
        }
    }

    /// The same in O(n log n): ids stay in place and are linked; the queue holds candidates, some out of date.
    fn merge_long(&self, scratch: &mut Scratch, out: &mut Vec<u32>) {
        let Scratch { ids, made, previous, next, queue } = scratch;
        let end = ids.len();
        previous.clear();
        previous.extend((0..end).map(|index| index.wrapping_sub(1)));
        next.clear();
        next.extend(1..=end);
        queue.clear();
        queue
            .extend(made.iter().enumerate().filter(|(_, &token)| token != NONE).map(|(i, &token)| Reverse((token, i))));
        while let Some(Reverse((token, index))) = queue.pop() {
            if made[index] != token {
                continue; // a neighbour was merged since, or this id itself into the one before
            }
            let gone = next[index];
            let after = next[gone];
            ids[index] = token;
            next[index] = after;
            made[gone] = NONE;
            made[index] = NONE;
            if after < end {
                previous[after] = index;
                made[index] = self.made(token, ids[after]);
                if made[index] != NONE {
                    queue.push(Reverse((made[index], index)));
                }
            }
            if index > 0 {
                let before = previous[index];
                made[before] = self.made(ids[before], token);
                if made[before] != NONE {
                    queue.push(Reverse((made[before], before)));
                }
            }
        }
        let mut index = 0;
        while index < end {
            out.push(ids[index]);
            index = next[index];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{naive_encode, naive_merges, random_text, Random};
    use crate::{train, PieceCounts, GPT4_PATTERN};

    fn model(pattern: &str, merges: &[Pair]) -> Model {
        Model::new(Some(Splitter::new(pattern).unwrap()), merges).unwrap()
    }

    fn encode(model: &Model, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        model.encode(text, &mut Scratch::default(), &mut ids).unwrap();
        ids
    }

    fn long_path(model: &Model, piece: &[u8]) -> Vec<u32> {
        let mut scratch = Scratch { ids: piece.iter().map(|&byte| byte.into()).collect(), ..Scratch::default() };
        scratch.made.extend(scratch.ids.windows(2).map(|pair| model.made(pair[0], pair[1])));
        scratch.made.push(NONE);
        let mut ids = Vec::new();
        model.merge_long(&mut scratch, &mut ids);
        ids
    }

    #[test]
    fn the_earliest_learned_pair_is_merged_first() {
        let model = model(r"(?s).+", &[(97, 97), (256, 97)]);
        assert_eq!(encode(&model, "aaa"), [257]);
        assert_eq!(encode(&model, "aaaa"), [256, 256]);
        assert_eq!(encode(&model, "aaaaa"), [256, 257]);
        assert_eq!(encode(&model, ""), [0; 0]);
    }

    #[test]
    fn short_and_long_pieces_equal_a_naive_encoder_on_random_texts() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let alphabet = ["a", "ab", "abcd", "汉字说", "a汉😀"][random.below(5)];
            let texts: Vec<(String, u64)> = (0..6).map(|_| (random_text(&mut random, alphabet, 30), 1)).collect();
            let pieces: Vec<(&str, u64)> = texts.iter().map(|(text, count)| (text.as_str(), *count)).collect();
            let merges = naive_merges(&pieces, 60);
            let model = model(r"(?s).+", &merges);
            for longest in [5, 40, 300] {
                let text = random_text(&mut random, alphabet, longest);
                let expected = naive_encode(text.as_bytes(), &merges);
                assert_eq!(encode(&model, &text), expected, "seed {seed}: {text:?}");
                if !text.is_empty() {
                    assert_eq!(long_path(&model, text.as_bytes()), expected, "seed {seed}: {text:?}");
                }
            }
        }
    }

    #[test]
    fn the_bytes_of_a_token_encode_to_that_token() {
        for seed in 0..50 {
            let mut random = Random::new(seed);
            let text = random_text(&mut random, ["ab", "abcd", "汉字说"][seed as usize % 3], 400);
            let mut counts = PieceCounts::new();
            counts.add(text.as_bytes(), 1);
            let merges = train(counts, 400, |_| true).unwrap();
            let model = Model::new(None, &merges).unwrap();
            for (id, bytes) in model.tokens().enumerate() {
                assert_eq!(naive_encode(bytes, &merges), [id as u32], "seed {seed}");
            }
        }
    }

    #[test]
    fn a_piece_of_a_million_letters_is_encoded() {
        let model = model(GPT4_PATTERN, &[(97, 97), (256, 256), (257, 257)]);
        assert_eq!(encode(&model, &"a".repeat(1_000_004)), [vec![258; 125_000], vec![257]].concat());
    }

    #[test]
    fn decoding_gives_the_text_back() {
        let model = model(GPT4_PATTERN, &[(228, 189), (256, 160), (104, 105)]);
        let text = "hi 你好, hi!\n";
        assert_eq!(model.decode(&encode(&model, text)).unwrap(), text.as_bytes());
        assert_eq!(model.decode(&[256]).unwrap(), [228, 189]);
    }

    #[test]
    fn unknown_ids_are_errors_with_their_place() {
        let model = Model::new(None, &[(104, 105)]).unwrap();
        assert_eq!(model.decode(&[0, 257]), Err(Error::UnknownId { index: 1, id: 257, vocab_size: 257 }));
    }

    #[test]
    fn merges_of_tokens_that_do_not_exist_are_errors() {
        assert_eq!(Model::new(None, &[(97, 256)]).err(), Some(Error::BadMerge { token: 256 }));
    }

    #[test]
    fn encoding_before_training_is_an_error() {
        let model = Model::new(None, &[]).unwrap();
        assert_eq!(model.encode("a", &mut Scratch::default(), &mut Vec::new()), Err(Error::Untrained));
        assert_eq!(model.vocab_size(), 256);
    }

    #[test]
    fn text_that_the_pattern_does_not_cover_is_an_error() {
        let failed = model(r"\w+", &[]).encode("ab cd", &mut Scratch::default(), &mut Vec::new());
        assert_eq!(failed, Err(Error::NotCovered { character: 2, excerpt: " cd".into() }));
    }
}
