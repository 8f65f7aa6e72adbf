//! Counts how often each distinct piece occurs.
//!
//! Most texts repeat a few tens of thousands of pieces, so a table of short pieces does most of the work. Its speed is
//! limited by memory: a piece's place is prefetched when the piece is found, and read 32 pieces later.

use hashbrown::HashTable;

use crate::key::{hash, Key, LONGEST_KEY};
use crate::prefetch::prefetch;
use crate::{Error, Splitter};

/// How many pieces are found before the first of them is looked up.
const BATCH: usize = 32;
/// The size of a new table. The table doubles when more than half of its places are taken.
const PLACES: usize = 1 << 14;

/// Distinct pieces with their counts. Their order is arbitrary, and no result may depend on it.
pub struct PieceCounts {
    /// Pieces of up to [`LONGEST_KEY`] bytes, each in the first place that was free at or after its hash.
    places: Vec<Place>,
    taken: usize,
    /// The bytes of all longer pieces, one after another.
    bytes: Vec<u8>,
    long: HashTable<Long>,
}

#[derive(Clone, Copy)]
struct Place {
    key: Key,
    count: u64,
}

struct Long {
    hash: u64,
    start: usize,
    length: usize,
    count: u64,
}

impl PieceCounts {
    pub fn new() -> Self {
        let places = vec![Place { key: Key::NONE, count: 0 }; PLACES];
        Self { places, taken: 0, bytes: Vec::new(), long: HashTable::new() }
    }

    /// Count the pieces of `text`. If this fails, the pieces before the failure are counted.
    pub fn add_text(&mut self, text: &str, splitter: &Splitter) -> Result<(), Error> {
        let mut batch = [(Key::NONE, 0); BATCH];
        let mut filled = 0;
        let bytes = text.as_bytes();
        let split = splitter.split(text, |start, end| {
            if end - start > LONGEST_KEY {
                return self.add_long(hash(&bytes[start..end]), &bytes[start..end], 1);
            }
            let key = Key::new(bytes, start, end);
            let place = key.hash() as usize & (self.places.len() - 1);
            prefetch(&self.places, place);
            batch[filled] = (key, place);
            filled += 1;
            if filled == BATCH {
                self.add_batch(&batch);
                filled = 0;
            }
        });
        batch[..filled].iter().for_each(|&(key, _)| self.add_short(key, 1));
        split
    }

    /// Add `count` occurrences of one piece.
    pub fn add(&mut self, piece: &[u8], count: u64) {
        match piece.len() {
            0 => {}
            1..=LONGEST_KEY => self.add_short(Key::new(piece, 0, piece.len()), count),
            _ => self.add_long(hash(piece), piece, count),
        }
    }

    /// Add the counts of another table.
    pub fn add_all(&mut self, other: &Self) {
        for place in other.places.iter().filter(|place| place.key != Key::NONE) {
            self.add_short(place.key, place.count);
        }
        for long in &other.long {
            self.add_long(long.hash, &other.bytes[long.start..long.start + long.length], long.count);
        }
    }

    /// The number of distinct pieces.
    pub fn len(&self) -> usize {
        self.taken + self.long.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Call `take` with every piece and its count.
    pub fn for_each(&self, mut take: impl FnMut(&[u8], u64)) {
        for place in self.places.iter().filter(|place| place.key != Key::NONE) {
            take(&place.key.bytes()[..place.key.len()], place.count);
        }
        for long in &self.long {
            take(&self.bytes[long.start..long.start + long.length], long.count);
        }
    }

    fn add_batch(&mut self, batch: &[(Key, usize); BATCH]) {
        for &(key, place) in batch {
            match self.places.get_mut(place) {
                Some(known) if known.key == key => known.count += 1,
                _ => self.add_short(key, 1), // in a later place, or new, or the table has grown since
            }
        }
    }

    fn add_short(&mut self, key: Key, count: u64) {
        let mask = self.places.len() - 1;
        let mut at = key.hash() as usize & mask;
        while self.places[at].key != key {
            if self.places[at].key == Key::NONE {
                self.places[at].key = key;
                self.taken += 1;
                break;
            }
            at = (at + 1) & mask;
        }
        self.places[at].count += count;
        if self.taken > self.places.len() / 2 {
            self.grow();
        }
    }

    fn grow(&mut self) {
        let doubled = vec![Place { key: Key::NONE, count: 0 }; 2 * self.places.len()];
        let mask = doubled.len() - 1;
        for place in std::mem::replace(&mut self.places, doubled) {
            if place.key != Key::NONE {
                let mut at = place.key.hash() as usize & mask;
                while self.places[at].key != Key::NONE {
                    at = (at + 1) & mask;
                }
                self.places[at] = place;
            }
        }
    }

    fn add_long(&mut self, hash: u64, piece: &[u8], count: u64) {
        let Self { bytes, long, .. } = self;
        let same = |long: &Long| long.hash == hash && &bytes[long.start..long.start + long.length] == piece;
        if let Some(known) = long.find_mut(hash, same) {
            known.count += count;
            return;
        }
        let new = Long { hash, start: bytes.len(), length: piece.len(), count };
        bytes.extend_from_slice(piece);
        long.insert_unique(hash, new, |long| long.hash);
    }
}

impl Default for PieceCounts {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::testing::{random_text, Random};
    use crate::GPT4_PATTERN;

    fn as_map(counts: &PieceCounts) -> HashMap<Vec<u8>, u64> {
        let mut map = HashMap::new();
        counts.for_each(|piece, count| assert_eq!(map.insert(piece.to_vec(), count), None));
        assert_eq!(map.len(), counts.len());
        map
    }

    #[test]
    fn counts_are_those_of_a_plain_map_while_the_table_grows() {
        let mut random = Random::new(1);
        let (mut counts, mut expected) = (PieceCounts::new(), HashMap::<Vec<u8>, u64>::new());
        let splitter = Splitter::new(GPT4_PATTERN).unwrap();
        for number in 0..9000 {
            let word: String = format!("{:05}", number * 7).chars().map(|digit| (digit as u8 + 49) as char).collect();
            let text = format!("{number} {word} {}", random_text(&mut random, "ab 汉字。", 60));
            counts.add_text(&text, &splitter).unwrap();
            let take = |start, end| *expected.entry(text.as_bytes()[start..end].to_vec()).or_default() += 1;
            splitter.split(&text, take).unwrap();
        }
        assert!(counts.places.len() > PLACES && !counts.long.is_empty());
        assert_eq!(as_map(&counts), expected);
    }

    #[test]
    fn tables_add_up() {
        let texts = ["a b a", "b a long long word of more than fifteen: aaaaaaaaaaaaaaaaaaaaaaaaa", "c"];
        let splitter = Splitter::new(GPT4_PATTERN).unwrap();
        let (mut whole, mut sum) = (PieceCounts::new(), PieceCounts::new());
        for text in texts {
            let mut one = PieceCounts::new();
            one.add_text(text, &splitter).unwrap();
            sum.add_all(&one);
            whole.add_text(text, &splitter).unwrap();
        }
        assert_eq!(as_map(&whole), as_map(&sum));
    }

    #[test]
    fn counts_hold_more_than_32_bits() {
        for piece in ["ab", "a long one of more than fifteen"] {
            let mut counts = PieceCounts::new();
            counts.add(piece.as_bytes(), u64::from(u32::MAX));
            counts.add(piece.as_bytes(), 7);
            assert_eq!(as_map(&counts), HashMap::from([(piece.as_bytes().to_vec(), u64::from(u32::MAX) + 7)]));
        }
    }
}
