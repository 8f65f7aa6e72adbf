//! Which merges cross a place of a text: mostly none, and then nobody has to follow the tokens on its sides back in time.

/// A set of numbers that may say yes to one that it does not have, but never no to one that it has.
pub struct Filter(Vec<u64>);

impl Filter {
    pub fn new(bits: usize) -> Self {
        Self(vec![0; bits.div_ceil(64).next_power_of_two()])
    }

    /// The word of a hash whose bits are all good, and two bits in it.
    #[inline]
    fn place(&self, hash: u64) -> (usize, u64) {
        ((hash >> 44) as usize & (self.0.len() - 1), 1 << (hash >> 32 & 63) | 1 << (hash >> 38 & 63))
    }

    pub fn add(&mut self, hash: u64) {
        let (word, bits) = self.place(hash);
        self.0[word] |= bits;
    }

    #[inline]
    pub fn may_have(&self, hash: u64) -> bool {
        let (word, bits) = self.place(hash);
        self.0[word] & bits == bits
    }
}

/// Bytes on each side that are looked at: a Han letter has as many.
const SIDE: usize = 3;
const LONG_BITS: usize = 1 << 19;

/// What stands around the borders of all pairs that are merged.
pub struct Borders {
    /// For pairs with a side shorter than [`SIDE`]: a bit for each last byte of the left and first byte of the right.
    short: Vec<u64>,
    /// For all other pairs: the last bytes of the left and the first ones of the right.
    long: Filter,
}

impl Borders {
    pub fn new<'t>(pairs: impl Iterator<Item = (&'t [u8], &'t [u8])>) -> Self {
        let mut borders = Self { short: vec![0; (1 << 16) / 64], long: Filter::new(LONG_BITS) };
        for (left, right) in pairs {
            let both = [left, right].concat();
            if left.len() < SIDE || right.len() < SIDE {
                let (word, bit) = short(&both, left.len());
                borders.short[word] |= bit;
            } else {
                borders.long.add(long(&both, left.len()));
            }
        }
        borders
    }

    /// Whether some merge may cross this place of a text, from what stands right beside it.
    #[inline]
    pub fn may_be_crossed(&self, text: &[u8], at: usize) -> bool {
        if at < SIDE || at + SIDE > text.len() {
            return true;
        }
        let (word, bit) = short(text, at);
        self.short[word] & bit != 0 || self.long.may_have(long(text, at))
    }
}

#[inline]
fn short(text: &[u8], at: usize) -> (usize, u64) {
    let both = usize::from(text[at - 1]) << 8 | usize::from(text[at]);
    (both / 64, 1 << (both % 64))
}

#[inline]
fn long(text: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes[..2 * SIDE].copy_from_slice(&text[at - SIDE..at + SIDE]);
    let product = u128::from(u64::from_le_bytes(bytes) ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_borders_of_pairs_are_known_and_few_others() {
        let pairs = ["今天|天气", "说|话", "a|bcd", "xyz|xyz", "abcdef|ghi"].map(|pair| pair.split_once('|').unwrap());
        let borders = Borders::new(pairs.iter().map(|(left, right)| (left.as_bytes(), right.as_bytes())));
        let known = |text: &str| {
            let at = text.find('|').unwrap();
            borders.may_be_crossed(text.replace('|', "").as_bytes(), at)
        };
        assert!(["明天|天空", "说|话", "xxa|bxx", "wxyz|xyzw", "def|gh"].iter().all(|text| known(text)));
        assert!(!["明天|气天", "话|说", "xxb|axx", "wyz|xyzw", "abc|def"].iter().any(|text| known(text)));
    }

    #[test]
    fn a_filter_has_what_was_added_and_little_else() {
        let mut filter = Filter::new(1 << 12);
        let hash = |number: u64| (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..200).for_each(|number| filter.add(hash(number)));
        assert!((0..200).all(|number| filter.may_have(hash(number))));
        assert!((200..10_000).filter(|&number| filter.may_have(hash(number))).count() < 500);
    }
}
