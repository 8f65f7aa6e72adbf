//! Tokens: their bytes, the merges that make them, and which of them may be neighbours.

use std::ops::Range;
use std::sync::OnceLock;

use crate::borders::Borders;
use crate::index::Index;
use crate::key::Key;
pub use crate::merges::Meetings;
use crate::merges::Merges;
use crate::tokens::Tokens;
use crate::trie::{Trie, NONE};
use crate::{Error, Pair, BYTES};

/// The 256 byte values, and the tokens that merges make of them. Immutable.
pub struct Vocabulary {
    tokens: Tokens,
    index: Index,
    merges: Merges,
    borders: Borders,
    /// What long pieces need. Making it takes as long as making all the rest, and most texts have no such piece.
    prefixes: OnceLock<Prefixes>,
}

/// The tokens by the bytes that they begin with.
pub struct Prefixes {
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
    pub fn new(pairs: &[Pair]) -> Result<Self, Error> {
        let mut tokens = Tokens::with_capacity(BYTES as usize + pairs.len());
        for byte in 0..=255 {
            tokens.push(&[byte])?;
        }
        let mut merges = Merges::new(BYTES as usize + pairs.len());
        for (id, &(left, right)) in (BYTES..).zip(pairs) {
            let newest = left.max(right);
            if newest >= id {
                return Err(Error::BadMerge { token: newest });
            }
            tokens.push_pair(left, right)?;
            merges.add(left, right);
        }
        let index = Index::new(&tokens);
        Ok(Self::of(tokens, index, merges))
    }

    /// Build a vocabulary from the bytes of every token by id, which is what tiktoken stores. The merges are worked out
    /// from the bytes: a token is made of the two tokens that its bytes would give without it.
    pub fn from_tokens(tokens: Tokens) -> Result<Self, Error> {
        for id in 0..tokens.number() as u32 {
            let token = tokens.of(id);
            if id < BYTES && token != [id as u8] {
                return Err(Error::NotAByte { token: id });
            }
            if token.is_empty() {
                return Err(Error::NotAMerge { token: id, parts: 0 });
            }
        }
        if tokens.number() < BYTES as usize {
            return Err(Error::NotAByte { token: tokens.number() as u32 });
        }
        let index = Index::new(&tokens);
        let mut merges = Merges::new(tokens.number());
        for id in BYTES..tokens.number() as u32 {
            let Some((left, right)) = halves(id, &tokens, &index, &merges) else {
                return Err(Error::NotAMerge { token: id, parts: number_of_parts(tokens.of(id), &merges) });
            };
            merges.add(left, right);
        }
        Ok(Self::of(tokens, index, merges))
    }

    fn of(tokens: Tokens, index: Index, merges: Merges) -> Self {
        let ids = BYTES..tokens.number() as u32;
        let pairs = ids.zip(merges.pairs());
        let borders = Borders::new(pairs.map(|(id, &(left, _))| (tokens.of(id), tokens.range(left).len())));
        Self { tokens, index, merges, borders, prefixes: OnceLock::new() }
    }

    /// The number of tokens.
    pub fn size(&self) -> u32 {
        self.tokens.number() as u32
    }

    /// The merges, by the pairs that they merge.
    #[inline]
    pub fn merges(&self) -> &Merges {
        &self.merges
    }

    /// The bytes of a token.
    #[inline]
    pub fn token(&self, id: u32) -> &[u8] {
        self.tokens.of(id)
    }

    /// The token with these bytes, if there is one. `hash` is the hash of their key.
    #[inline]
    pub fn find(&self, hash: u64, bytes: &[u8]) -> Option<u32> {
        self.index.find(hash, bytes, &self.tokens)
    }

    /// The tokens by the bytes that they begin with. The first call takes milliseconds.
    #[inline]
    pub fn prefixes(&self) -> &Prefixes {
        self.prefixes.get_or_init(|| Prefixes::new(&self.tokens))
    }

    /// Whether [`Vocabulary::prefixes`] was called before.
    #[inline]
    pub fn has_prefixes(&self) -> bool {
        self.prefixes.get().is_some()
    }

    /// Whether these two tokens can be neighbours at a place of a text, where the right one begins.
    #[inline]
    pub fn may_meet_at(&self, text: &[u8], place: usize, pair: Pair, known: &mut Meetings) -> bool {
        !self.borders.may_be_crossed(text, place) || known.may_meet(&self.merges, pair)
    }

    /// Cut a piece into parts that have the same tokens alone as in the piece, and call `take` with the end of each.
    #[inline]
    pub fn cut(&self, piece: &[u8], take: impl FnMut(usize)) {
        self.borders.cut(piece, take);
    }
}

impl Prefixes {
    fn new(tokens: &Tokens) -> Self {
        let tokens: Vec<&[u8]> = (0..tokens.number() as u32).map(|id| tokens.of(id)).collect();
        let (trie, shorter) = Trie::new(&tokens);
        let head = |(&shorter, token): (&u32, &&[u8])| Head { shorter, length: token.len() as u32 };
        Self { heads: shorter.iter().zip(&tokens).map(head).collect(), trie }
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
}

/// The two tokens that the bytes of token `id` give with the merges before it; None if they do not give two tokens.
///
/// All ways to split the bytes into two tokens are tried. At most one of them is an encoding.
fn halves(id: u32, tokens: &Tokens, index: &Index, merges: &Merges) -> Option<Pair> {
    let Range { start, end } = tokens.range(id);
    let part = |range: Range<usize>| match range.len() {
        1 => Some(tokens.all()[range.start].into()),
        _ => {
            let hash = Key::of(tokens.all(), range.clone()).hash();
            index.find(hash, &tokens.all()[range], tokens).filter(|&part| part < id)
        }
    };
    (start + 1..end).rev().find_map(|border| {
        let pair = (part(start..border)?, part(border..end)?);
        merges.may_meet(pair.0, pair.1).then_some(pair)
    })
}

/// How many tokens the bytes of a token give.
fn number_of_parts(token: &[u8], merges: &Merges) -> usize {
    let mut ids: Vec<u32> = token.iter().map(|&byte| byte.into()).collect();
    let earliest = |ids: &[u32]| {
        let made = ids.windows(2).enumerate().map(|(index, pair)| (merges.made(pair[0], pair[1]), index));
        made.filter(|&(id, _)| id != NONE).min()
    };
    while let Some((id, index)) = earliest(&ids) {
        ids[index] = id;
        ids.remove(index + 1);
    }
    ids.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_tokens<T: AsRef<[u8]>>(all: &[T]) -> Result<Vocabulary, Error> {
        let mut tokens = Tokens::default();
        all.iter().for_each(|token| tokens.push(token.as_ref()).unwrap());
        Vocabulary::from_tokens(tokens)
    }

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
            assert_eq!(vocabulary.merges.may_meet(left, right), may, "{left} {right}");
        }
    }

    #[test]
    fn merges_are_found_again_from_tokens() {
        let merges = [(97, 98), (98, 99), (256, 99), (97, 97), (259, 259), (260, 256)];
        let vocabulary = Vocabulary::new(&merges).unwrap();
        let tokens: Vec<&[u8]> = (0..vocabulary.size()).map(|id| vocabulary.token(id)).collect();
        assert_eq!(tokens[261], b"aaaaab");
        assert_eq!(from_tokens(&tokens).unwrap().merges().pairs(), merges);
    }

    #[test]
    fn tokens_that_no_merge_makes_are_errors() {
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        assert_eq!(from_tokens(&tokens[..255]).err(), Some(Error::NotAByte { token: 255 }));
        tokens.push(b"abc".to_vec());
        assert_eq!(from_tokens(&tokens).err(), Some(Error::NotAMerge { token: 256, parts: 3 }));
        tokens[256] = Vec::new();
        assert_eq!(from_tokens(&tokens).err(), Some(Error::NotAMerge { token: 256, parts: 0 }));
        tokens[256] = b"a".to_vec();
        assert_eq!(from_tokens(&tokens).err(), Some(Error::NotAMerge { token: 256, parts: 1 }));
        tokens.swap(7, 8);
        assert_eq!(from_tokens(&tokens).err(), Some(Error::NotAByte { token: 7 }));
        assert_eq!(Vocabulary::new(&[(97, 256)]).err(), Some(Error::BadMerge { token: 256 }));
    }
}
