//! Tokens: their bytes, the merges that make them, and which of them may be neighbours.

use hashbrown::HashMap;

use crate::borders::{Borders, Filter};
use crate::key::fold;
use crate::trie::{Trie, NONE};
use crate::{key, Error, Pair, BYTES};

/// Bits of the filter that rules out most pairs that are never merged: 16 bits for each of 65,536 merges.
const FILTER_BITS: usize = 1 << 20;
/// The most bytes of all tokens together, since the trie cannot number more nodes.
const MOST_BYTES: usize = 1 << 29;

/// The 256 byte values, and the tokens that merges make of them. Immutable.
pub struct Vocabulary {
    /// The pair that each token is made of. For a byte, the byte itself, twice.
    parts: Vec<Pair>,
    /// A hash table of merged tokens: each is in the first place that was free at or after the hash of its pair.
    merges: Vec<u32>,
    /// The hashes of all pairs in `merges`.
    filter: Filter,
    borders: Borders,
    /// The bytes of all tokens, one after another.
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<u32>,
    heads: Vec<Head>,
    trie: Trie,
}

/// The length of a token, and the next shorter token that it begins with.
#[derive(Clone, Copy)]
pub struct Head {
    /// The longest other token that this token begins with. NONE for a byte.
    pub shorter: u32,
    /// The number of bytes of this token.
    pub length: u32,
}

impl Vocabulary {
    /// Build a vocabulary. The merge at index i makes token 256 + i from two earlier tokens.
    pub fn new(merges: &[Pair]) -> Result<Self, Error> {
        let mut bytes: Vec<u8> = (0..=255).collect();
        let mut ends: Vec<u32> = (1..=BYTES).collect();
        let mut parts: Vec<Pair> = (0..BYTES).map(|byte| (byte, byte)).collect();
        let mut filter = Filter::new(FILTER_BITS);
        for (id, &(left, right)) in (BYTES..).zip(merges) {
            let newest = left.max(right);
            if newest >= id {
                return Err(Error::BadMerge { token: newest });
            }
            let parts_bytes = [range(&ends, left), range(&ends, right)];
            let all = bytes.len() + parts_bytes.iter().map(|range| range.len()).sum::<usize>();
            if all > MOST_BYTES {
                return Err(Error::TooLongTokens { bytes: all, most: MOST_BYTES });
            }
            parts_bytes.into_iter().for_each(|range| bytes.extend_from_within(range));
            ends.push(bytes.len() as u32);
            parts.push((left, right));
            filter.add(hash(left, right));
        }
        let tokens = (0..ends.len() as u32).map(|id| &bytes[range(&ends, id)]);
        let trie = Trie::new(tokens.clone());
        let head = |token: &[u8]| {
            let (shorter, _) = trie.longest(&token[..token.len() - 1], 0);
            Head { shorter, length: token.len() as u32 }
        };
        let heads = tokens.map(head).collect();
        let token = |id: u32| &bytes[range(&ends, id)];
        let borders = Borders::new(merges.iter().map(|&(left, right)| (token(left), token(right))));
        let merges = table(&parts);
        Ok(Self { parts, merges, filter, borders, bytes, ends, heads, trie })
    }

    /// Build a vocabulary from the bytes of every token by id, which is what tiktoken stores. The merges are worked out
    /// from the bytes: a token is made of the two tokens that its bytes would give without it.
    pub fn from_tokens<T: AsRef<[u8]>>(tokens: &[T]) -> Result<Self, Error> {
        let mut made: HashMap<u64, u32> = HashMap::with_capacity(tokens.len());
        let mut merges = Vec::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            let token = token.as_ref();
            if id < BYTES as usize {
                if token != [id as u8] {
                    return Err(Error::NotAByte { token: id as u32 });
                }
                continue;
            }
            let mut ids: Vec<u32> = token.iter().map(|&byte| byte.into()).collect();
            let find = |pair: &[u32]| made.get(&key((pair[0], pair[1]))).copied();
            while let Some((earliest, index)) =
                ids.windows(2).enumerate().filter_map(|(index, pair)| Some((find(pair)?, index))).min()
            {
                ids[index] = earliest;
                ids.remove(index + 1);
            }
            let &[left, right] = ids.as_slice() else {
                return Err(Error::NotAMerge { token: id as u32, parts: ids.len() });
            };
            made.insert(key((left, right)), id as u32);
            merges.push((left, right));
        }
        if tokens.len() < BYTES as usize {
            return Err(Error::NotAByte { token: tokens.len() as u32 });
        }
        Self::new(&merges)
    }

    /// The number of tokens.
    pub fn size(&self) -> u32 {
        self.ends.len() as u32
    }

    /// The pair that each token after the bytes is made of.
    pub fn merges(&self) -> &[Pair] {
        &self.parts[BYTES as usize..]
    }

    /// The bytes of a token.
    #[inline]
    pub fn token(&self, id: u32) -> &[u8] {
        &self.bytes[range(&self.ends, id)]
    }

    /// The longest token that begins at `start`, and where it ends.
    #[inline]
    pub fn longest(&self, text: &[u8], start: usize) -> (u32, usize) {
        self.trie.longest(text, start)
    }

    #[inline]
    pub fn head(&self, id: u32) -> Head {
        self.heads[id as usize]
    }

    /// The token that these two tokens merge to, or NONE.
    #[inline]
    fn made(&self, left: u32, right: u32) -> u32 {
        let hash = hash(left, right);
        if !self.filter.may_have(hash) {
            return NONE;
        }
        let mut place = hash as usize & (self.merges.len() - 1);
        loop {
            let id = self.merges[place];
            if id == NONE || self.parts[id as usize] == (left, right) {
                return id;
            }
            place = (place + 1) & (self.merges.len() - 1);
        }
    }

    /// Whether these two tokens can be neighbours at a place of a text, where the right one begins.
    #[inline]
    pub fn may_meet_at(&self, text: &[u8], place: usize, left: u32, right: u32) -> bool {
        !self.borders.may_be_crossed(text, place) || self.may_meet(left, right)
    }

    /// Cut a piece into parts that have the same tokens alone as in the piece, and call `take` with the end of each.
    #[inline]
    pub fn cut(&self, piece: &[u8], take: impl FnMut(usize)) {
        self.borders.cut(piece, take);
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

fn range(ends: &[u32], id: u32) -> std::ops::Range<usize> {
    let start = if id == 0 { 0 } else { ends[id as usize - 1] };
    start as usize..ends[id as usize] as usize
}

/// The hash of a pair. All bits of both tokens affect its low bits.
#[inline]
fn hash(left: u32, right: u32) -> u64 {
    fold(key((left, right)) ^ 0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93)
}

/// The hash table of merged tokens by their pairs. At least half of its places are free.
fn table(parts: &[Pair]) -> Vec<u32> {
    let mut places = vec![NONE; (2 * parts.len()).next_power_of_two()];
    for (id, &(left, right)) in (0..).zip(parts).skip(BYTES as usize) {
        let mut place = hash(left, right) as usize & (places.len() - 1);
        while places[place] != NONE {
            place = (place + 1) & (places.len() - 1);
        }
        places[place] = id;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_meet_unless_a_merge_across_the_border_comes_first() {
        let merges = [(97, 98), (98, 99), (256, 99), (97, 97)]; // 256 ab, 257 bc, 258 abc, 259 aa
        let vocabulary = Vocabulary::new(&merges).unwrap();
        for (left, right, may) in [
            (97, 98, false),  // they are merged themselves
            (98, 97, true),   // no merge knows them
            (97, 257, false), // a b|c: ab was learned before bc
            (256, 99, false), // ab c is abc
            (256, 256, true),
            (259, 97, true), // aaa is merged from the left
            (97, 259, false),
            (259, 259, true),
            (259, 98, false), // a a|b: ab before aa
        ] {
            assert_eq!(vocabulary.may_meet(left, right), may, "{left} {right}");
        }
    }

    #[test]
    fn merges_are_found_again_from_tokens() {
        let merges = [(97, 98), (98, 99), (256, 99), (97, 97), (259, 259), (260, 256)];
        let vocabulary = Vocabulary::new(&merges).unwrap();
        let tokens: Vec<&[u8]> = (0..vocabulary.size()).map(|id| vocabulary.token(id)).collect();
        assert_eq!(tokens[261], b"aaaaab");
        assert_eq!(Vocabulary::from_tokens(&tokens).unwrap().merges(), merges);
    }

    #[test]
    fn tokens_that_no_merge_makes_are_errors() {
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        assert_eq!(Vocabulary::from_tokens(&tokens[..255]).err(), Some(Error::NotAByte { token: 255 }));
        tokens.push(b"abc".to_vec());
        assert_eq!(Vocabulary::from_tokens(&tokens).err(), Some(Error::NotAMerge { token: 256, parts: 3 }));
        tokens[256] = Vec::new();
        assert_eq!(Vocabulary::from_tokens(&tokens).err(), Some(Error::NotAMerge { token: 256, parts: 0 }));
        tokens[256] = b"a".to_vec();
        assert_eq!(Vocabulary::from_tokens(&tokens).err(), Some(Error::NotAMerge { token: 256, parts: 1 }));
        tokens.swap(7, 8);
        assert_eq!(Vocabulary::from_tokens(&tokens).err(), Some(Error::NotAByte { token: 7 }));
        assert_eq!(Vocabulary::new(&[(97, 256)]).err(), Some(Error::BadMerge { token: 256 }));
    }
}
