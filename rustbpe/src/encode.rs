//! Encodes text as tokens.
//!
//! By definition, an encoding comes from merging pairs again and again, which is slow. But the result is the only
//! sequence of tokens for the text in which every two neighbours may meet ([`Vocabulary::may_meet_at`]). So at each
//! place the longest token is tried first, then shorter ones; if none fits, the previous token is taken back. A place
//! that led nowhere is not tried again, so the time is proportional to the length of the piece.
//!
//! The algorithm: H. van Antwerpen and A. Neubeck, "So many tokens, so little time", GitHub 2024.
//!
//! The tokens of pieces that were encoded before come from a cache. English words repeat often. A piece of Chinese is
//! everything between two punctuation marks, so it is mostly new. Pieces are therefore cut wherever no merge can cross
//! ([`Vocabulary::cut`]): the tokens on one side of a cut do not depend on the other side, and the parts are so short
//! that they do repeat.

use crate::cache::{Cache, Known, TOKENS};
use crate::key::{Key, LONGEST_KEY};
use crate::trie::NONE;
use crate::{Error, Splitter, Vocabulary};

/// How many pieces are found before the first of them is looked up.
const BATCH: usize = 32;

/// The working memory of one encoding thread, kept from text to text.
pub struct Scratch {
    cache: Cache,
    /// For each place in the piece: whether no token leads on from here. Exactly the places in `closed` are set.
    dead: Vec<bool>,
    closed: Vec<usize>,
}

impl Scratch {
    /// Working memory with a cache of about `cache_bytes` bytes.
    pub fn new(cache_bytes: usize) -> Self {
        Self { cache: Cache::new(cache_bytes), dead: Vec::new(), closed: Vec::new() }
    }
}

/// A piece, or a part of a piece, that waits to be encoded.
#[derive(Clone, Copy)]
struct Waiting {
    start: usize,
    end: usize,
    key: Key,
    hash: u64,
}

const NOTHING: Waiting = Waiting { start: 0, end: 0, key: Key::NONE, hash: 0 };

/// Pieces that are collected and then encoded together.
struct Batch<'e> {
    vocabulary: &'e Vocabulary,
    text: &'e [u8],
    scratch: &'e mut Scratch,
    ids: &'e mut Vec<u32>,
    waiting: [Waiting; BATCH],
    filled: usize,
}

/// Append the tokens of `text` to `ids`.
pub fn encode(
    vocabulary: &Vocabulary,
    splitter: &Splitter,
    text: &str,
    scratch: &mut Scratch,
    ids: &mut Vec<u32>,
) -> Result<(), Error> {
    let bytes = text.as_bytes();
    let mut batch = Batch { vocabulary, text: bytes, scratch, ids, waiting: [NOTHING; BATCH], filled: 0 };
    let split = splitter.split(text, |start, end| {
        // There is no place to cut in a short piece of ASCII.
        if end - start <= LONGEST_KEY {
            let key = Key::new(bytes, start, end);
            if key.begins_with_ascii() {
                return batch.add(start, end, key);
            }
        }
        batch.add_parts(start, end);
    });
    batch.encode();
    split
}

impl Batch<'_> {
    #[inline(always)]
    fn add(&mut self, start: usize, end: usize, key: Key) {
        let hash = key.hash();
        self.scratch.cache.expect(hash);
        self.waiting[self.filled] = Waiting { start, end, key, hash };
        self.filled += 1;
        if self.filled == BATCH {
            self.encode();
        }
    }

    /// Cut a piece and add its parts. Not inlined, so that the loop around `add` stays short.
    #[inline(never)]
    fn add_parts(&mut self, start: usize, end: usize) {
        let Self { vocabulary, text, .. } = *self;
        let mut from = start;
        vocabulary.cut(&text[start..end], |length| {
            let to = start + length;
            let long = to - from > LONGEST_KEY;
            self.add(from, to, if long { Key::long(&text[from..to]) } else { Key::new(text, from, to) });
            from = to;
        });
    }

    /// Append the tokens of the collected pieces.
    fn encode(&mut self) {
        let Self { vocabulary, text, scratch, ids, .. } = self;
        // Most pieces are in the cache and have few tokens. Those tokens are collected here and appended together.
        let (mut few, mut number) = ([0; TOKENS * BATCH], 0);
        for &Waiting { start, end, key, hash } in &self.waiting[..self.filled] {
            match scratch.cache.get(key, hash) {
                Known::Few(tokens, length) => {
                    // Copy the whole array whatever its length: this needs no branch that the processor must predict.
                    few[number..number + TOKENS].copy_from_slice(&tokens);
                    number += length;
                    continue;
                }
                known => {
                    ids.extend_from_slice(&few[..number]);
                    number = 0;
                    let (piece, first) = (&text[start..end], ids.len());
                    if !scratch.cache.stored(known, key, piece, ids) {
                        encode_piece(vocabulary, piece, scratch, ids);
                        scratch.cache.put(key, hash, piece, &ids[first..]);
                    }
                }
            }
        }
        ids.extend_from_slice(&few[..number]);
        self.filled = 0;
    }
}

/// Append the tokens of one piece.
fn encode_piece(vocabulary: &Vocabulary, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
    let Scratch { dead, closed, .. } = scratch;
    if dead.len() <= piece.len() {
        dead.resize((piece.len() + 1).next_power_of_two(), false);
    }
    let first = ids.len();
    let mut at = 0;
    let (mut candidate, mut end) = vocabulary.longest(piece, 0);
    while at < piece.len() {
        let fits =
            !dead[end] && (ids.len() == first || vocabulary.may_meet_at(piece, at, ids[ids.len() - 1], candidate));
        if fits {
            ids.push(candidate);
            at = end;
            if at < piece.len() {
                (candidate, end) = vocabulary.longest(piece, at);
            }
            continue;
        }
        candidate = vocabulary.head(candidate).shorter;
        while candidate == NONE {
            // No token fits here: take back the previous one, and try a shorter one in its place. The whole piece
            // always has an encoding, so this never goes back beyond its first token.
            dead[at] = true;
            closed.push(at);
            let Some(last) = ids.pop() else { return };
            let head = vocabulary.head(last);
            at -= head.length as usize;
            candidate = head.shorter;
        }
        end = at + vocabulary.head(candidate).length as usize;
    }
    closed.drain(..).for_each(|place| dead[place] = false);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{naive_encode, naive_merges, random_text, Random};
    use crate::{train, PieceCounts, GPT4_PATTERN};

    fn encoded(vocabulary: &Vocabulary, pattern: &str, text: &str, scratch: &mut Scratch) -> Vec<u32> {
        let mut ids = Vec::new();
        encode(vocabulary, &Splitter::new(pattern).unwrap(), text, scratch, &mut ids).unwrap();
        ids
    }

    #[test]
    fn the_earliest_learned_pair_is_merged_first() {
        let vocabulary = Vocabulary::new(&[(97, 97), (256, 97)]).unwrap();
        let scratch = &mut Scratch::new(0);
        for (text, ids) in
            [("aaa", vec![257]), ("aaaa", vec![256, 256]), ("aaaaa", vec![256, 257]), ("", vec![]), ("b", vec![98])]
        {
            assert_eq!(encoded(&vocabulary, r"(?s).+", text, scratch), ids);
        }
    }

    #[test]
    fn tokens_equal_a_naive_encoder_on_random_texts() {
        for seed in 0..400 {
            let mut random = Random::new(seed);
            let alphabet = ["a", "ab", "abcd", "汉字说", "a汉😀"][random.below(5)];
            let texts: Vec<(String, u64)> = (0..6).map(|_| (random_text(&mut random, alphabet, 30), 1)).collect();
            let pieces: Vec<(&str, u64)> = texts.iter().map(|(text, count)| (text.as_str(), *count)).collect();
            let merges = naive_merges(&pieces, 60);
            let vocabulary = Vocabulary::new(&merges).unwrap();
            let scratch = &mut Scratch::new(0);
            for longest in [3, 5, 9, 40, 300] {
                let text = random_text(&mut random, alphabet, longest);
                let expected = naive_encode(text.as_bytes(), &merges);
                for _ in ["new", "from the cache"] {
                    assert_eq!(encoded(&vocabulary, r"(?s).+", &text, scratch), expected, "seed {seed}: {text:?}");
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
            let vocabulary = Vocabulary::new(&train(counts, 400, |_| true).unwrap()).unwrap();
            for id in 0..vocabulary.size() {
                let mut ids = Vec::new();
                encode_piece(&vocabulary, vocabulary.token(id), &mut Scratch::new(0), &mut ids);
                assert_eq!(ids, [id], "seed {seed}");
            }
        }
    }

    #[test]
    fn a_piece_of_a_million_letters_is_encoded() {
        let vocabulary = Vocabulary::new(&[(97, 97), (256, 256), (257, 257)]).unwrap();
        let scratch = &mut Scratch::new(0);
        let ids = encoded(&vocabulary, GPT4_PATTERN, &"a".repeat(1_000_004), scratch);
        assert_eq!(ids, [vec![258; 125_000], vec![257]].concat());
        assert!(scratch.closed.is_empty() && !scratch.dead.contains(&true));
    }
}
