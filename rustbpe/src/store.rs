//! A ring buffer for the bytes and tokens of pieces: when it is full, the oldest records are overwritten.

const LEAST_BYTES: usize = 1 << 14;
/// The most bytes of a record. Larger records are not stored.
const LONGEST: usize = 1 << 10;
const BYTES_OF_ID: usize = 4;

/// Where a record is: the low and the high half of the number of bytes written before it, and its number of tokens.
pub type Record = [u32; 3];

pub struct Store {
    /// Only as long as the part that has been written.
    ring: Vec<u8>,
    /// A power of two.
    most_bytes: usize,
    /// How many bytes were ever written, including the skipped ends of the ring.
    written: u64,
}

impl Store {
    /// A store of up to `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        let most_bytes = 1 << bytes.max(LEAST_BYTES).ilog2();
        Self { ring: Vec::new(), most_bytes, written: 0 }
    }

    /// Store a piece and its tokens. None if they are too long.
    pub fn put(&mut self, piece: &[u8], ids: &[u32]) -> Option<Record> {
        let size = piece.len() + BYTES_OF_ID * ids.len();
        if size > LONGEST {
            return None;
        }
        let mut at = self.place(self.written);
        if at + size > self.most_bytes {
            self.written += (self.most_bytes - at) as u64;
            at = 0;
        }
        if self.ring.len() < at + size {
            self.ring.resize(at + size, 0);
        }
        let (bytes, tokens) = self.ring[at..at + size].split_at_mut(piece.len());
        bytes.copy_from_slice(piece);
        tokens.chunks_exact_mut(BYTES_OF_ID).zip(ids).for_each(|(place, id)| place.copy_from_slice(&id.to_ne_bytes()));
        let record = [self.written as u32, (self.written >> 32) as u32, ids.len() as u32];
        self.written += size as u64;
        Some(record)
    }

    /// Append the tokens of a record to `ids`. False if it was overwritten, or belongs to another piece.
    pub fn get(&self, [low, high, number]: Record, piece: &[u8], ids: &mut Vec<u32>) -> bool {
        let start = u64::from(low) | u64::from(high) << 32;
        if self.written - start > self.most_bytes as u64 {
            return false;
        }
        let known = &self.ring[self.place(start)..][..piece.len() + BYTES_OF_ID * number as usize];
        let (bytes, tokens) = known.split_at(piece.len());
        if bytes != piece {
            return false;
        }
        ids.extend(tokens.chunks_exact(BYTES_OF_ID).map(|id| u32::from_ne_bytes([id[0], id[1], id[2], id[3]])));
        true
    }

    fn place(&self, written: u64) -> usize {
        written as usize & (self.most_bytes - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_gives_the_newest_and_never_what_was_written_over() {
        let mut store = Store::new(LEAST_BYTES);
        let piece = |number: usize| vec![number as u8; number % 40];
        let tokens = |number: usize| vec![number as u32; number % 30];
        let mut records = Vec::new();
        let mut gone = 0;
        for number in 0..5000 {
            records.push(store.put(&piece(number), &tokens(number)).unwrap());
            for earlier in (0..=number).rev().take(250) {
                let mut ids = vec![7];
                let known = store.get(records[earlier], &piece(earlier), &mut ids);
                assert!(known || earlier + 50 < number);
                assert_eq!(ids[1..], if known { tokens(earlier) } else { vec![] });
                gone += usize::from(!known);
            }
        }
        assert!(store.ring.len() <= LEAST_BYTES && gone > 100_000, "{gone}");
    }

    #[test]
    fn another_piece_is_not_given() {
        let mut store = Store::new(0);
        let record = store.put(b"piece", &[1, 2]).unwrap();
        assert!(!store.get(record, b"peace", &mut Vec::new()));
        assert_eq!(store.put(&[0; LONGEST - 3], &[1]), None);
    }
}
