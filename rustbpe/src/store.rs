//! A ring buffer for the bytes and tokens of pieces: when it is full, the oldest records are overwritten.

const LEAST_WORDS: usize = 1 << 12;
/// The most words of a record. Larger records are not stored.
pub const LONGEST: usize = 1 << 8;
const BYTES_OF_WORD: usize = 4;

/// Where a record is: the low and the high half of the number of words written before it, and its number of tokens.
pub type Record = [u32; 3];

pub struct Store {
    /// The bytes of a piece, four to a word, then its tokens. Only as long as the part that has been written.
    ring: Vec<u32>,
    /// How long the ring may be now, a power of two.
    words: usize,
    most_words: usize,
    /// How many words were ever written, including the skipped ends of the ring.
    written: u64,
    /// Records before this one were lost when the ring grew.
    first: u64,
}

impl Store {
    /// A store that may grow to `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        let most_words = 1 << (bytes / BYTES_OF_WORD).max(LEAST_WORDS).ilog2();
        Self { ring: Vec::new(), words: LEAST_WORDS, most_words, written: 0, first: 0 }
    }

    /// Let the ring grow to about this many bytes.
    pub fn grow(&mut self, bytes: usize) {
        let words = (1 << (bytes / BYTES_OF_WORD).max(LEAST_WORDS).ilog2()).min(self.most_words);
        if words > self.words && self.written > self.words as u64 {
            self.first = self.written; // the places of older records follow from the old length
        }
        self.words = self.words.max(words);
    }

    /// Store a piece and its tokens. None if they are too long.
    pub fn put(&mut self, piece: &[u8], ids: &[u32]) -> Option<Record> {
        let size = piece.len().div_ceil(BYTES_OF_WORD) + ids.len();
        if size > LONGEST {
            return None;
        }
        let mut at = self.place(self.written);
        if at + size > self.words {
            self.written += (self.words - at) as u64;
            at = 0;
        }
        if self.ring.len() < at + size {
            self.ring.resize(at + size, 0);
        }
        let (bytes, tokens) = self.ring[at..at + size].split_at_mut(size - ids.len());
        bytes.iter_mut().zip(words(piece)).for_each(|(place, word)| *place = word);
        tokens.copy_from_slice(ids);
        let record = [self.written as u32, (self.written >> 32) as u32, ids.len() as u32];
        self.written += size as u64;
        Some(record)
    }

    /// The tokens of a record. None if it was overwritten, or belongs to another piece.
    #[inline]
    pub fn get(&self, [low, high, number]: Record, piece: &[u8]) -> Option<&[u32]> {
        let start = u64::from(low) | u64::from(high) << 32;
        if self.written - start > self.words as u64 || start < self.first {
            return None;
        }
        let bytes = piece.len().div_ceil(BYTES_OF_WORD);
        let (known, tokens) = self.ring[self.place(start)..][..bytes + number as usize].split_at(bytes);
        known.iter().zip(words(piece)).all(|(&known, word)| known == word).then_some(tokens)
    }

    #[inline]
    fn place(&self, written: u64) -> usize {
        written as usize & (self.words - 1)
    }
}

/// The bytes of a piece, four to a word, with zeros after the last one.
#[inline]
fn words(piece: &[u8]) -> impl Iterator<Item = u32> + '_ {
    let whole = piece.chunks_exact(BYTES_OF_WORD);
    let mut rest = [0; BYTES_OF_WORD];
    rest[..whole.remainder().len()].copy_from_slice(whole.remainder());
    let last = (!whole.remainder().is_empty()).then(|| u32::from_le_bytes(rest));
    whole.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).chain(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gives_the_newest_and_never_what_was_written_over() {
        let mut store = Store::new(BYTES_OF_WORD * LEAST_WORDS);
        let piece = |number: usize| vec![number as u8; number % 40];
        let tokens = |number: usize| vec![number as u32; number % 30];
        let mut records = Vec::new();
        let mut gone = 0;
        for number in 0..5000 {
            records.push(store.put(&piece(number), &tokens(number)).unwrap());
            for earlier in (0..=number).rev().take(250) {
                let known = store.get(records[earlier], &piece(earlier));
                assert!(known.is_some() || earlier + 50 < number);
                assert!(known.is_none_or(|known| known == tokens(earlier)));
                gone += usize::from(known.is_none());
            }
        }
        assert!(store.ring.len() <= LEAST_WORDS && gone > 100_000, "{gone}");
    }

    #[test]
    fn it_gives_what_was_stored_before_it_grew_or_nothing() {
        let (mut store, mut records, mut kept) = (Store::new(1 << 20), Vec::new(), 0);
        for number in 0..20_000u32 {
            let piece = number.to_string();
            records.push((store.put(piece.as_bytes(), &[number; 5]).unwrap(), piece));
            if number % 1000 == 0 {
                store.grow(number as usize * 20);
                for (earlier, (record, piece)) in (0..).zip(&records) {
                    let known = store.get(*record, piece.as_bytes());
                    assert!(known.is_none_or(|known| known == [earlier; 5]));
                    kept += usize::from(known.is_some());
                }
            }
        }
        assert!(store.words > LEAST_WORDS && kept > 1000, "{kept}");
    }

    #[test]
    fn another_piece_is_not_given() {
        let mut store = Store::new(0);
        let record = store.put(b"piece", &[1, 2]).unwrap();
        assert_eq!(store.get(record, b"peace"), None);
        assert_eq!(store.get(record, b"piece"), Some([1, 2].as_slice()));
        assert_eq!(store.put(&[0; BYTES_OF_WORD * LONGEST - 3], &[1]), None);
    }
}
