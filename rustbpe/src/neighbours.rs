//! The tokens on one side of the occurrences of the pair that is being merged.

use crate::prefetch::prefetch;

/// How many occurrences ahead the sums are prefetched.
const AHEAD: usize = 16;

/// The neighbour at each occurrence, and sums by token in an array that is used again for every merge.
#[derive(Default)]
pub struct Neighbours {
    /// One entry for each occurrence, by ascending place.
    pub found: Vec<Found>,
    /// The distinct neighbours.
    pub tokens: Vec<u32>,
    sums: Vec<Sum>,
}

#[derive(Clone, Copy)]
pub struct Found {
    /// The neighbouring token.
    pub token: u32,
    pub weight: u32,
    /// Where the merged pair begins.
    pub place: u32,
}

#[derive(Clone, Copy, Default)]
pub struct Sum {
    pub weight: u64,
    /// How many occurrences there are; 0 if the new pair is too rare to be tracked.
    pub number: u32,
    /// Where the next place of the new pair will be written.
    pub next: u32,
}

impl Sum {
    /// Write down a place, if room was set aside for the places of this pair.
    #[inline]
    pub fn put(&mut self, block: &mut [u32], place: u32) {
        if self.number > 0 {
            block[self.next as usize] = place;
            self.next += 1;
        }
    }
}

impl Neighbours {
    /// Clear everything, and make room for `vocab_size` tokens.
    pub fn reset(&mut self, vocab_size: usize) {
        for &token in &self.tokens {
            self.sums[token as usize] = Sum::default();
        }
        self.tokens.clear();
        self.found.clear();
        if self.sums.len() < vocab_size {
            self.sums.resize(vocab_size.next_power_of_two(), Sum::default());
        }
    }

    /// Note an occurrence.
    #[inline]
    pub fn add(&mut self, token: u32, weight: u32, place: usize) {
        self.found.push(Found { token, weight, place: place as u32 });
    }

    /// Sum up the noted occurrences by token.
    pub fn sum_up(&mut self) {
        for (index, found) in self.found.iter().enumerate() {
            if let Some(later) = self.found.get(index + AHEAD) {
                prefetch(&self.sums, later.token as usize);
            }
            let sum = &mut self.sums[found.token as usize];
            if sum.number == 0 {
                self.tokens.push(found.token);
            }
            sum.weight += u64::from(found.weight);
            sum.number += 1;
        }
    }

    #[inline]
    pub fn of(&mut self, token: u32) -> &mut Sum {
        &mut self.sums[token as usize]
    }
}
