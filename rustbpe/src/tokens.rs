//! The bytes of tokens.

use std::ops::Range;

use crate::Error;

/// The most bytes of all tokens together, since the trie cannot number more nodes.
const MOST_BYTES: usize = 1 << 29;

/// The bytes of all tokens, one after another, and where each token's bytes end.
#[derive(Default)]
pub struct Tokens {
    all: Vec<u8>,
    ends: Vec<u32>,
}

impl Tokens {
    /// No tokens yet, and room for this many.
    pub fn with_capacity(number: usize) -> Self {
        Self { all: Vec::with_capacity(8 * number), ends: Vec::with_capacity(number) }
    }

    /// Add the next token. An error if all tokens together are too long.
    pub fn push(&mut self, token: &[u8]) -> Result<(), Error> {
        self.check_room(token.len())?;
        self.all.extend_from_slice(token);
        self.ends.push(self.all.len() as u32);
        Ok(())
    }

    /// Add a token with the bytes of two others. An error if all tokens together are too long.
    pub fn push_pair(&mut self, left: u32, right: u32) -> Result<(), Error> {
        self.check_room(self.range(left).len() + self.range(right).len())?;
        self.all.extend_from_within(self.range(left));
        self.all.extend_from_within(self.range(right));
        self.ends.push(self.all.len() as u32);
        Ok(())
    }

    /// The number of tokens.
    pub fn number(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of all tokens, one after another.
    #[inline]
    pub fn all(&self) -> &[u8] {
        &self.all
    }

    /// Where a token is among the bytes of all tokens.
    #[inline]
    pub fn range(&self, id: u32) -> Range<usize> {
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        start as usize..self.ends[id as usize] as usize
    }

    /// The bytes of a token.
    #[inline]
    pub fn of(&self, id: u32) -> &[u8] {
        &self.all[self.range(id)]
    }

    fn check_room(&self, more: usize) -> Result<(), Error> {
        let all = self.all.len() + more;
        if all > MOST_BYTES {
            return Err(Error::TooLongTokens { bytes: all, most: MOST_BYTES });
        }
        Ok(())
    }
}
