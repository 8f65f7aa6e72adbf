//! Short pieces as numbers, which tables compare and hash in a few instructions.

use std::ops::Range;

/// A [`Key`] holds the bytes of pieces up to this length.
pub const LONGEST_KEY: usize = 15;
/// Marks a longer piece, in place of the length.
const LONG: u64 = 0xff;

/// For a short piece: its bytes, and its length in the highest byte. It is never 0, because no piece is empty. For a
/// longer piece: its hash and its length, so different long pieces may have the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Key {
    low: u64,
    high: u64,
}

impl Key {
    /// The key in the empty places of a table, which no piece has.
    pub const NONE: Self = Self { low: 0, high: 0 };

    /// The key of `text[start..end]`, which must have 1 to [`LONGEST_KEY`] bytes.
    #[inline]
    pub fn new(text: &[u8], start: usize, end: usize) -> Self {
        let length = end - start;
        debug_assert!((1..=LONGEST_KEY).contains(&length));
        let (low, high) = match text.get(start..start + 16) {
            Some(bytes) => halves(bytes),
            None => {
                let mut padded = [0; 16];
                padded[..length].copy_from_slice(&text[start..end]);
                halves(&padded)
            }
        };
        let mask = &MASKS[length & 15];
        Self { low: low & mask.0, high: high & mask.1 | (length as u64) << 56 }
    }

    /// The key of a piece of any length, which is a part of `text`.
    #[inline]
    pub fn of(text: &[u8], range: Range<usize>) -> Self {
        if range.len() > LONGEST_KEY {
            Self::long(&text[range])
        } else {
            Self::new(text, range.start, range.end)
        }
    }

    /// The key of a piece with more than [`LONGEST_KEY`] bytes.
    #[inline]
    pub fn long(piece: &[u8]) -> Self {
        Self { low: hash(piece), high: LONG << 56 | piece.len() as u64 }
    }

    #[inline]
    pub fn is_long(self) -> bool {
        self.high >> 56 == LONG
    }

    /// Whether the first eight bytes of a short piece are all ASCII.
    #[inline]
    pub fn begins_with_ascii(self) -> bool {
        self.low & 0x8080_8080_8080_8080 == 0
    }

    /// A hash in which every bit depends on every bit of the key.
    #[inline]
    pub fn hash(self) -> u64 {
        fold(self.low ^ 0x9e37_79b9_7f4a_7c15, self.high ^ 0xd6e8_feb8_6659_fd93)
    }

    pub fn len(self) -> usize {
        (self.high >> 56) as usize
    }

    /// The piece, padded to 16 bytes.
    pub fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.low.to_le_bytes());
        bytes[8..].copy_from_slice(&self.high.to_le_bytes());
        bytes
    }
}

/// The hash of a piece of any length.
#[inline]
pub fn hash(piece: &[u8]) -> u64 {
    let mut state = 0x2545_f491_4f6c_dd1d ^ piece.len() as u64;
    let blocks = piece.chunks_exact(16);
    let rest = blocks.remainder();
    for block in blocks {
        let (low, high) = halves(block);
        state = fold(low ^ state, high ^ 0xa076_1d64_78bd_642f);
    }
    let mut padded = [0; 16];
    padded[..rest.len()].copy_from_slice(rest);
    let (low, high) = halves(&padded);
    fold(low ^ state, high ^ 0xe703_7ed1_a0b4_28db)
}

#[inline]
fn halves(bytes: &[u8]) -> (u64, u64) {
    let half = |at: usize| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(half)
    };
    (half(0), half(8))
}

/// Multiply to 128 bits and combine both halves, so that every bit of the factors affects every bit of the result.
#[inline]
pub fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    (product >> 64) as u64 ^ product as u64
}

/// Masks that keep the first `length` of 16 bytes, by length.
static MASKS: [(u64, u64); 16] = {
    let mut masks = [(0, 0); 16];
    let mut length = 0;
    while length < 16 {
        masks[length] =
            if length < 8 { ((1 << (8 * length)) - 1, 0) } else { (u64::MAX, (1 << (8 * (length - 8))) - 1) };
        length += 1;
    }
    masks
};

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_key_holds_the_piece_wherever_it_stands() {
        let text: Vec<u8> = (1..60).collect();
        for length in 1..=LONGEST_KEY {
            for start in 0..=text.len() - length {
                let key = Key::new(&text, start, start + length);
                assert_eq!(key, Key::new(&text[start..start + length], 0, length));
                assert_eq!((&key.bytes()[..key.len()], key.len()), (&text[start..start + length], length));
            }
        }
    }

    #[test]
    fn pieces_that_differ_only_in_zeros_at_the_end_have_different_keys_and_hashes() {
        let keys: Vec<Key> = (1..=LONGEST_KEY).map(|length| Key::new(&[0; 32], 0, length)).collect();
        assert_eq!(keys.iter().map(|key| key.hash()).collect::<HashSet<_>>().len(), LONGEST_KEY);
        assert!(keys.iter().all(|&key| key != Key::NONE));
        let hashes: HashSet<u64> = (0..100).map(|length| hash(&[0; 100][..length])).collect();
        assert_eq!(hashes.len(), 100);
    }

    #[test]
    fn a_long_piece_never_has_the_key_of_a_short_one() {
        let keys: Vec<Key> = (16..300).map(|length| Key::long(&[0; 300][..length])).collect();
        assert!(keys.iter().all(|key| key.is_long() && *key != Key::NONE));
        assert_eq!(keys.iter().map(|key| key.hash()).collect::<HashSet<_>>().len(), keys.len());
        assert!((1..=LONGEST_KEY).all(|length| !Key::new(&[255; 32], 0, length).is_long()));
    }

    #[test]
    fn all_bits_of_a_hash_depend_on_each_byte() {
        let base = Key::new(b"abcdefghijklmno", 0, 15).hash();
        for at in 0..15 {
            let mut bytes = *b"abcdefghijklmno";
            bytes[at] ^= 1;
            let changed = (Key::new(&bytes, 0, 15).hash() ^ base).count_ones();
            assert!((12..=52).contains(&changed), "{changed} bits changed");
        }
    }
}
