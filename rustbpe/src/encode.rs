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

use crate::cache::{Cache, Known, LONGEST, TOKENS};
use crate::key::{Key, LONGEST_KEY};
use crate::trie::NONE;
use crate::vocabulary::Meetings;
use crate::{Error, Splitter, Vocabulary};

/// How many pieces are found before the first of them is looked up.
const BATCH: usize = 32;
/// How many tokens are collected before they are appended to the others.
const COLLECTED: usize = 1 << 11;
/// The most bytes of a piece whose pairs are merged, because that is faster than going through its tokens.
const SHORT: usize = 24;
/// The same as long as no piece was longer. This is slower, but only very long pieces are worth [`Vocabulary::prefixes`].
const MEDIUM: usize = 128;

/// The working memory of one encoding thread, kept from text to text.
pub struct Scratch {
    cache: Cache,
    meetings: Meetings,
    /// For each place in the piece: whether no token leads on from here. Exactly the places in `closed` are set.
    dead: Vec<u64>,
    closed: Vec<usize>,
    /// Tokens that are not appended yet, in the first places.
    collected: Box<[u32; COLLECTED]>,
}

impl Scratch {
    /// Working memory with a cache of about `cache_bytes` bytes.
    pub fn new(cache_bytes: usize) -> Self {
        Self {
            cache: Cache::new(cache_bytes),
            meetings: Meetings::new(),
            dead: Vec::new(),
            closed: Vec::new(),
            collected: Box::new([0; COLLECTED]),
        }
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
            self.add(from, to, Key::of(text, from..to));
            from = to;
        });
    }

    /// Append the tokens of the collected pieces.
    fn encode(&mut self) {
        let Self { vocabulary, text, scratch, ids, .. } = self;
        let mut number = 0; // of collected tokens
        scratch.cache.looked_up(self.filled);
        for &Waiting { start, end, key, hash } in &self.waiting[..self.filled] {
            if number + LONGEST > COLLECTED {
                ids.extend_from_slice(&scratch.collected[..number]);
                number = 0;
            }
            let known = scratch.cache.get(key, hash);
            let piece = &text[start..end];
            match known {
                Known::Few(tokens, length) => {
                    // Copy the whole array whatever its length: this needs no branch that the processor must predict.
                    scratch.collected[number..number + TOKENS].copy_from_slice(&tokens);
                    number += length;
                    continue;
                }
                Known::Stored(record) => {
                    if let Some(tokens) = scratch.cache.stored(record, key, piece) {
                        scratch.collected[number..number + tokens.len()].copy_from_slice(tokens);
                        number += tokens.len();
                        continue;
                    }
                }
                Known::Nothing => {}
            }
            ids.extend_from_slice(&scratch.collected[..number]);
            number = 0;
            let first = ids.len();
            encode_piece(vocabulary, piece, hash, scratch, ids);
            scratch.cache.put(key, hash, piece, &ids[first..]);
        }
        ids.extend_from_slice(&scratch.collected[..number]);
        self.filled = 0;
    }
}

/// Append the tokens of one piece. `hash` is the hash of its key.
fn encode_piece(vocabulary: &Vocabulary, piece: &[u8], hash: u64, scratch: &mut Scratch, ids: &mut Vec<u32>) {
    if let Some(token) = vocabulary.find(hash, piece) {
        ids.push(token);
    } else if piece.len() <= SHORT {
        vocabulary.merges().merge::<SHORT>(piece, ids);
    } else if piece.len() <= MEDIUM && !vocabulary.has_prefixes() {
        vocabulary.merges().merge::<MEDIUM>(piece, ids);
    } else {
        encode_long(vocabulary, piece, scratch, ids);
    }
}

/// Append the tokens of a piece of any length, in linear time.
fn encode_long(vocabulary: &Vocabulary, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
    let Scratch { meetings, dead, closed, .. } = scratch;
    let prefixes = vocabulary.prefixes();
    if dead.len() <= piece.len() / 64 {
        dead.resize(piece.len() / 64 + 1, 0);
    }
    let first = ids.len();
    let mut at = 0;
    let (mut candidate, mut end) = prefixes.longest(piece, 0);
    while at < piece.len() {
        let is_dead = dead[end / 64] >> (end % 64) & 1 != 0;
        let fits = !is_dead
            && (ids.len() == first || vocabulary.may_meet_at(piece, at, (ids[ids.len() - 1], candidate), meetings));
        if fits {
            ids.push(candidate);
            at = end;
            if at < piece.len() {
                (candidate, end) = prefixes.longest(piece, at);
            }
            continue;
        }
        candidate = prefixes.head(candidate).shorter;
        while candidate == NONE {
            // No token fits here: take back the previous one, and try a shorter one in its place. The whole piece
            // always has an encoding, so this never goes back beyond its first token.
            dead[at / 64] |= 1 << (at % 64);
            closed.push(at);
            let Some(last) = ids.pop() else { return };
            let head = prefixes.head(last);
            at -= head.length as usize;
            candidate = head.shorter;
        }
        end = at + prefixes.head(candidate).length as usize;
    }
    closed.drain(..).for_each(|place| dead[place / 64] = 0);
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
                let token = vocabulary.token(id);
                encode_piece(&vocabulary, token, Key::of(token, 0..token.len()).hash(), &mut Scratch::new(0), &mut ids);
                assert_eq!(ids, [id], "seed {seed}");
            }
        }
    }

    #[test]
    fn all_ways_to_encode_a_piece_give_the_same_tokens() {
        for seed in 0..50 {
            let mut random = Random::new(seed);
            let alphabet = ["ab", "abcd", "汉字说", "жшя"][seed as usize % 4];
            let mut counts = PieceCounts::new();
            counts.add(random_text(&mut random, alphabet, 400).as_bytes(), 1);
            let vocabulary = Vocabulary::new(&train(counts, 400, |_| true).unwrap()).unwrap();
            for length in 1..=MEDIUM {
                let text = random_text(&mut random, alphabet, length);
                let piece = &text.as_bytes()[..text.len().min(MEDIUM)];
                let (mut merged, mut found) = (Vec::new(), Vec::new());
                vocabulary.merges().merge::<MEDIUM>(piece, &mut merged);
                encode_long(&vocabulary, piece, &mut Scratch::new(0), &mut found);
                assert_eq!(merged, found, "seed {seed}: {text:?}");
            }
        }
    }

    #[test]
    fn a_piece_of_a_million_letters_is_encoded() {
        let vocabulary = Vocabulary::new(&[(97, 97), (256, 256), (257, 257)]).unwrap();
        let scratch = &mut Scratch::new(0);
        let ids = encoded(&vocabulary, GPT4_PATTERN, &"a".repeat(1_000_004), scratch);
        assert_eq!(ids, [vec![258; 125_000], vec![257]].concat());
        assert!(scratch.closed.is_empty() && scratch.dead.iter().all(|&bits| bits == 0));
    }
}
