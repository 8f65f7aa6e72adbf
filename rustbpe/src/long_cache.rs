//! The tokens of long pieces that were met before.
//!
//! Also of short pieces that have many. What differs from [`crate::cache`]: a piece of any length has no key, so the table holds its hash and where its bytes
//! and its tokens lie, one after the other, among those of all others. When that store is full everything is
//! forgotten.

use crate::prefetch::prefetch;

const FIRST_PLACES: usize = 1 << 10;
/// Bytes of a piece and its tokens; larger ones are not kept.
const LONGEST: usize = 1 << 10;
const BYTES_OF_ID: usize = 4;

#[derive(Clone, Copy, Default)]
struct Place {
    hash: u64,
    start: u32,
    /// Of the piece; 0 where the place is empty.
    length: u16,
    /// Number of its tokens.
    ids: u16,
}

/// One thread's cache of long pieces.
pub struct LongCache {
    places: Vec<Place>,
    store: Vec<u8>,
    most_bytes: usize,
    news: usize,
}

impl LongCache {
    /// A cache of about `bytes`.
    pub fn new(bytes: usize) -> Self {
        Self { places: vec![Place::default(); FIRST_PLACES], store: Vec::new(), most_bytes: bytes, news: 0 }
    }

    /// Ask for the memory where a piece may stand, to be there when it is looked at.
    #[inline]
    pub fn expect(&self, hash: u64) {
        prefetch(&self.places, self.index(hash));
    }

    /// Append the tokens of a piece to `ids`, if they are known.
    #[inline]
    pub fn get(&self, hash: u64, piece: &[u8], ids: &mut Vec<u32>) -> bool {
        let index = self.index(hash);
        for place in [self.places[index], self.places[index ^ 1]] {
            if place.hash != hash || usize::from(place.length) != piece.len() {
                continue;
            }
            let known = &self.store[place.start as usize..];
            let (bytes, tokens) = known.split_at(piece.len());
            if bytes == piece {
                let tokens = tokens.chunks_exact(BYTES_OF_ID).take(place.ids.into());
                ids.extend(tokens.map(|id| u32::from_ne_bytes([id[0], id[1], id[2], id[3]])));
                return true;
            }
        }
        false
    }

    /// Keep the tokens of a piece.
    pub fn put(&mut self, hash: u64, piece: &[u8], ids: &[u32]) {
        let size = piece.len() + BYTES_OF_ID * ids.len();
        if size > LONGEST || size > self.most_bytes {
            return;
        }
        if self.store.len() + size + size_of_val(self.places.as_slice()) > self.most_bytes {
            self.places.fill(Place::default());
            self.store.clear();
            self.news = 0;
        }
        self.news += 1;
        if self.news > self.places.len() / 2 {
            self.grow();
        }
        let start = self.store.len() as u32;
        self.store.extend_from_slice(piece);
        ids.iter().for_each(|id| self.store.extend_from_slice(&id.to_ne_bytes()));
        self.place(Place { hash, start, length: piece.len() as u16, ids: ids.len() as u16 });
    }

    #[inline]
    fn index(&self, hash: u64) -> usize {
        hash as usize & (self.places.len() - 1)
    }

    fn place(&mut self, new: Place) {
        let index = self.index(new.hash);
        self.places[index ^ 1] = self.places[index];
        self.places[index] = new;
    }

    fn grow(&mut self) {
        let doubled = vec![Place::default(); 2 * self.places.len()];
        for place in std::mem::replace(&mut self.places, doubled) {
            if place.length > 0 {
                self.place(place);
            }
        }
        self.news = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::hash;

    #[test]
    fn it_gives_what_was_put_in_or_nothing_and_stays_in_its_bound() {
        let bound = 400_000;
        let mut cache = LongCache::new(bound);
        let piece = |number: usize| format!("a piece with the number {number}").repeat(1 + number % 3).into_bytes();
        let tokens = |number: usize| vec![number as u32; 1 + number % 20];
        let mut hits = 0;
        for number in 0..20_000 {
            cache.put(hash(&piece(number)), &piece(number), &tokens(number));
            for (asked, must) in [(number, true), (number - number.min(300), false)] {
                let mut ids = vec![7];
                if cache.get(hash(&piece(asked)), &piece(asked), &mut ids) {
                    assert_eq!(ids[1..], tokens(asked));
                    hits += 1;
                } else {
                    assert!(!must && ids == [7]);
                }
            }
            assert!(cache.store.len() + size_of_val(cache.places.as_slice()) < 2 * bound);
        }
        assert!(hits > 30_000, "{hits}");
    }

    #[test]
    fn pieces_of_one_hash_are_told_apart() {
        let mut cache = LongCache::new(1 << 20);
        cache.put(5, b"a long piece of text", &[1, 2]);
        let mut ids = Vec::new();
        assert!(!cache.get(5, b"a long piece of toxt", &mut ids));
        assert!(cache.get(5, b"a long piece of text", &mut ids));
        assert_eq!(ids, [1, 2]);
    }

    #[test]
    fn very_long_pieces_are_not_kept() {
        let mut cache = LongCache::new(1 << 20);
        cache.put(5, &[b'a'; LONGEST + 1], &[1]);
        assert!(!cache.get(5, &[b'a'; LONGEST + 1], &mut Vec::new()));
    }
}
