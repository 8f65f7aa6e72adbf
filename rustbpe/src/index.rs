//! Finds a token by its bytes, with one look into a hash table.

use crate::key::Key;
use crate::tokens::Tokens;

/// Marks a free place.
const FREE: u64 = 0;

/// A hash table: a token is in the first place that was free at or after its hash. At least half of the places are
/// free. A place has the high half of the hash, which tells most other bytes apart, and the token's id plus one.
pub struct Index(Vec<u64>);

impl Index {
    /// The index of all tokens. Of equal tokens, it has the first.
    pub fn new(tokens: &Tokens) -> Self {
        let mut index = Self(vec![FREE; (2 * tokens.number()).next_power_of_two()]);
        for id in 0..tokens.number() as u32 {
            let hash = Key::of(tokens.all(), tokens.range(id)).hash();
            if let Err(place) = index.look_up(hash, tokens.of(id), tokens) {
                index.0[place] = hash >> 32 << 32 | u64::from(id + 1);
            }
        }
        index
    }

    /// The token with these bytes, which must not be empty. `hash` is the hash of their key.
    #[inline]
    pub fn find(&self, hash: u64, bytes: &[u8], tokens: &Tokens) -> Option<u32> {
        self.look_up(hash, bytes, tokens).ok()
    }

    /// The token with these bytes, or the free place where it would be.
    #[inline]
    fn look_up(&self, hash: u64, bytes: &[u8], tokens: &Tokens) -> Result<u32, usize> {
        let mut place = hash as usize & (self.0.len() - 1);
        loop {
            let known = self.0[place];
            if known == FREE {
                return Err(place);
            }
            let id = (known as u32) - 1;
            if known >> 32 == hash >> 32 && tokens.of(id) == bytes {
                return Ok(id);
            }
            place = (place + 1) & (self.0.len() - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{random_text, Random};

    #[test]
    fn tokens_are_found_and_nothing_else_is() {
        for seed in 0..30 {
            let mut random = Random::new(seed);
            let mut texts: Vec<String> = (0..500).map(|_| random_text(&mut random, "a汉😀", 12)).collect();
            texts.retain(|text| !text.is_empty());
            let mut tokens = Tokens::default();
            texts[..300].iter().for_each(|text| tokens.push(text.as_bytes()).unwrap());
            let index = Index::new(&tokens);
            for text in &texts {
                let expected = texts[..300].iter().position(|token| token == text).map(|first| first as u32);
                assert_eq!(
                    index.find(Key::of(text.as_bytes(), 0..text.len()).hash(), text.as_bytes(), &tokens),
                    expected
                );
            }
        }
    }
}
