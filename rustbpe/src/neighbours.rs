//! What stands on one side of the occurrences of the pair that is being merged.

/// Sums by token, in an array of all tokens that is used again for every merge.
#[derive(Default)]
pub struct Neighbours {
    sums: Vec<Sum>,
    /// The tokens that occurred.
    pub tokens: Vec<u32>,
    /// (token, place of the pair that is being merged), one for each occurrence, places ascending.
    pub found: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Default)]
pub struct Sum {
    pub weight: u64,
    /// Number of occurrences.
    pub number: u32,
    /// Where the next place of the new pair is written.
    pub next: u32,
}

impl Neighbours {
    /// Forget everything, and make room for tokens up to `vocab_size`.
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

    #[inline]
    pub fn add(&mut self, token: u32, weight: u32, place: usize) {
        self.add_sum(token, u64::from(weight), 1);
        self.found.push((token, place as u32));
    }

    #[inline]
    pub fn add_sum(&mut self, token: u32, weight: u64, number: u32) {
        let sum = &mut self.sums[token as usize];
        if sum.number == 0 {
            self.tokens.push(token);
        }
        sum.weight += weight;
        sum.number += number;
    }

    #[inline]
    pub fn of(&mut self, token: u32) -> &mut Sum {
        &mut self.sums[token as usize]
    }
}
