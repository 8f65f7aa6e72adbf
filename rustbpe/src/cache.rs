//! The tokens of short pieces that were met before.
//!
//! A table of bounded size: a piece may stand at one of two places, and a new one takes the place of the one that came
//! first. One place is one line of the processor's cache.

use crate::key::Key;
use crate::prefetch::prefetch;

/// Pieces of more tokens are not kept.
pub const MOST_TOKENS: usize = 11;
const FIRST_PLACES: usize = 1 << 10;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Place {
    key: Key,
    length: u32,
    ids: [u32; MOST_TOKENS],
}

const EMPTY: Place = Place { key: Key::NONE, length: 0, ids: [0; MOST_TOKENS] };

/// One thread's cache. It begins small and doubles up to its bound.
pub struct Cache {
    places: Vec<Place>,
    most_places: usize,
    /// How often a piece has been put in since the table last grew.
    news: usize,
}

impl Cache {
    /// A cache of up to `bytes`.
    pub fn new(bytes: usize) -> Self {
        let most_places = (bytes / size_of::<Place>()).max(FIRST_PLACES);
        Self { places: vec![EMPTY; FIRST_PLACES], most_places, news: 0 }
    }

    /// Where a piece may stand. Its memory is asked for, to be there when it is looked at.
    #[inline]
    pub fn expect(&self, key: Key) -> usize {
        let place = key.hash() as usize & (self.places.len() - 1);
        prefetch(&self.places, place);
        place
    }

    /// The tokens of a piece that may stand at `place`.
    #[inline]
    pub fn get(&self, key: Key, place: usize) -> Option<&[u32]> {
        // A table that has grown in the meantime has the piece elsewhere, or not: then it is a miss.
        let mut known = self.places.get(place)?;
        if known.key != key {
            known = self.places.get(place ^ 1)?;
            if known.key != key {
                return None;
            }
        }
        known.ids.get(..known.length as usize)
    }

    /// Keep the tokens of a piece.
    pub fn put(&mut self, key: Key, ids: &[u32]) {
        if ids.len() > MOST_TOKENS {
            return;
        }
        self.news += 1;
        if self.news > self.places.len() / 2 && 2 * self.places.len() <= self.most_places {
            self.grow();
        }
        let mut new = Place { key, length: ids.len() as u32, ids: [0; MOST_TOKENS] };
        new.ids[..ids.len()].copy_from_slice(ids);
        self.place(new);
    }

    fn place(&mut self, new: Place) {
        let place = new.key.hash() as usize & (self.places.len() - 1);
        self.places[place ^ 1] = self.places[place];
        self.places[place] = new;
    }

    fn grow(&mut self) {
        let doubled = vec![EMPTY; 2 * self.places.len()];
        for place in std::mem::replace(&mut self.places, doubled) {
            if place.key != Key::NONE {
                self.place(place);
            }
        }
        self.news = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> Key {
        let piece = number.to_string();
        Key::new(piece.as_bytes(), 0, piece.len())
    }

    #[test]
    fn it_gives_what_was_put_in_or_nothing_and_stays_in_its_bound() {
        let mut cache = Cache::new(4 * FIRST_PLACES * size_of::<Place>());
        let tokens = |number: usize| vec![number as u32; 1 + number % MOST_TOKENS];
        let mut hits = 0;
        for number in 0..20_000 {
            cache.put(key(number), &tokens(number));
            assert_eq!(cache.get(key(number), cache.expect(key(number))), Some(tokens(number).as_slice()));
            let earlier = number - number.min(700);
            if let Some(ids) = cache.get(key(earlier), cache.expect(key(earlier))) {
                assert_eq!(ids, tokens(earlier));
                hits += 1;
            }
        }
        assert_eq!(cache.places.len(), 4 * FIRST_PLACES);
        assert!(hits > 15_000, "{hits}");
    }

    #[test]
    fn long_results_are_not_kept() {
        let mut cache = Cache::new(0);
        cache.put(key(7), &[1; MOST_TOKENS + 1]);
        assert_eq!(cache.get(key(7), cache.expect(key(7))), None);
    }
}
