//! Remembers the tokens of pieces that were encoded before.
//!
//! The cache is one table of bounded size. A piece has eight neighbouring places to choose from. A new piece takes the
//! first free one; when it is looked up, it swaps with the piece in its first place, where the next lookup finds it at
//! once. A place holds up to three tokens. If a piece has more, or if it is too long for its key, a [`Store`] holds the
//! rest.

use crate::key::Key;
use crate::prefetch::{in_large_pages, prefetch};
pub use crate::store::LONGEST;
use crate::store::{Record, Store};

/// How many tokens fit in a place.
pub const TOKENS: usize = 3;
/// This length means that `ids` is a record of the store.
const STORED: u32 = u32::MAX;
/// In how many places a piece may be.
const WAYS: usize = 8;
const FIRST_PLACES: usize = 1 << 10;
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Place {
    key: Key,
    length: u32,
    ids: [u32; TOKENS],
}

const EMPTY: Place = Place { key: Key::NONE, length: 0, ids: [0; TOKENS] };

/// What the cache knows about a piece.
#[derive(Clone, Copy)]
pub enum Known {
    Nothing,
    /// The tokens, and how many of the array's entries are in use.
    Few([u32; TOKENS], usize),
    /// The tokens are in the store.
    Stored(Record),
}

/// The cache of one thread. It starts small and doubles until it reaches its bound.
pub struct Cache {
    places: Vec<Place>,
    most_places: usize,
    /// How many times a place has been filled.
    news: usize,
    /// How many more pieces were found than not, since the table last grew.
    gain: i64,
    store: Store,
}

impl Cache {
    /// A cache that uses up to `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        let most_places = (bytes / 2 / size_of::<Place>()).max(FIRST_PLACES);
        Self { places: vec![EMPTY; FIRST_PLACES], most_places, news: 0, gain: 0, store: Store::new(bytes / 2) }
    }

    /// Note that this many pieces are looked up now.
    #[inline]
    pub fn looked_up(&mut self, number: usize) {
        self.gain += number as i64;
    }

    /// Start loading the first place of a piece, so that it has arrived when the piece is looked up.
    #[inline]
    pub fn expect(&self, hash: u64) {
        prefetch(&self.places, self.home(hash));
    }

    /// What is known about a piece.
    #[inline(always)]
    pub fn get(&mut self, key: Key, hash: u64) -> Known {
        let home = self.home(hash);
        if self.places[home].key != key && !self.bring(key, home) {
            return Known::Nothing;
        }
        let Place { length, ids, .. } = self.places[home];
        if length == STORED {
            Known::Stored(ids)
        } else {
            Known::Few(ids, length as usize)
        }
    }

    /// Look for a piece beyond its first place, and move it there: a piece that is looked up now will soon be looked up
    /// again. The piece that was there may end up behind a free place, where it is not found and is encoded once more.
    fn bring(&mut self, key: Key, home: usize) -> bool {
        for place in (1..WAYS).map(|way| home ^ way) {
            let other = self.places[place].key;
            if other == key {
                self.places.swap(home, place);
                return true;
            }
            if other == Key::NONE {
                return false;
            }
        }
        false
    }

    /// The tokens of a piece in the store. None if they are no longer there, or belong to another piece.
    #[inline]
    pub fn stored(&self, record: Record, key: Key, piece: &[u8]) -> Option<&[u32]> {
        self.store.get(record, if key.is_long() { piece } else { &[] })
    }

    /// Remember the tokens of a piece.
    pub fn put(&mut self, key: Key, hash: u64, piece: &[u8], ids: &[u32]) {
        let mut new = Place { key, length: ids.len() as u32, ids: [0; TOKENS] };
        if !key.is_long() && ids.len() <= TOKENS {
            new.ids[..ids.len()].copy_from_slice(ids);
        } else {
            let Some(record) = self.store.put(if key.is_long() { piece } else { &[] }, ids) else { return };
            (new.length, new.ids) = (STORED, record);
        }
        self.news += 1;
        // If most pieces are new, a larger table would not find them either, and it would be slower.
        self.gain = (self.gain - 2).max(-(self.places.len() as i64));
        if 2 * self.news > self.places.len() && 2 * self.places.len() <= self.most_places && self.gain >= 0 {
            self.grow();
        }
        self.place(new, hash);
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        hash as usize & (self.places.len() - 1)
    }

    /// Put an entry in the first free place, or replace one of the pieces there.
    fn place(&mut self, new: Place, hash: u64) {
        let home = self.home(hash);
        let free = (0..WAYS).map(|way| home ^ way).find(|&place| {
            let known = self.places[place].key;
            known == Key::NONE || known == new.key
        });
        self.places[free.unwrap_or(home ^ (self.news % WAYS))] = new;
    }

    fn grow(&mut self) {
        self.gain = 0;
        self.store.grow(2 * self.places.len() * size_of::<Place>());
        let mut doubled = in_large_pages(2 * self.places.len());
        doubled.resize(2 * self.places.len(), EMPTY);
        for place in std::mem::replace(&mut self.places, doubled) {
            if place.key != Key::NONE {
                self.place(place, place.key.hash());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every third piece is too long for its key.
    fn piece(number: usize) -> Vec<u8> {
        number.to_string().repeat(if number % 3 == 0 { 10 } else { 1 }).into_bytes()
    }

    fn tokens(number: usize) -> Vec<u32> {
        vec![number as u32; 1 + number % 7]
    }

    fn put(cache: &mut Cache, number: usize) {
        let piece = piece(number);
        cache.put(Key::of(&piece, 0..piece.len()), Key::of(&piece, 0..piece.len()).hash(), &piece, &tokens(number));
    }

    fn get(cache: &mut Cache, key: Key, piece: &[u8], ids: &mut Vec<u32>) -> bool {
        cache.looked_up(8);
        match cache.get(key, key.hash()) {
            Known::Few(tokens, number) => ids.extend_from_slice(&tokens[..number]),
            Known::Stored(record) => match cache.stored(record, key, piece) {
                Some(tokens) => ids.extend_from_slice(tokens),
                None => return false,
            },
            Known::Nothing => return false,
        }
        true
    }

    fn found(cache: &mut Cache, piece: &[u8]) -> Option<Vec<u32>> {
        let (key, mut ids) = (Key::of(piece, 0..piece.len()), vec![7]);
        cache.expect(key.hash());
        let known = get(cache, key, piece, &mut ids);
        assert!(ids[0] == 7 && known == (ids.len() > 1));
        known.then(|| ids[1..].to_vec())
    }

    #[test]
    fn it_gives_what_was_put_in_or_nothing_and_stays_in_its_bound() {
        let mut cache = Cache::new(2 * 4 * FIRST_PLACES * size_of::<Place>());
        let mut hits = 0;
        for number in 0..20_000 {
            put(&mut cache, number);
            assert_eq!(found(&mut cache, &piece(number)), Some(tokens(number)));
            let earlier = number - number.min(700);
            if let Some(ids) = found(&mut cache, &piece(earlier)) {
                assert_eq!(ids, tokens(earlier));
                hits += 1;
            }
        }
        assert_eq!(cache.places.len(), 4 * FIRST_PLACES);
        assert!(hits > 15_000, "{hits}");
    }

    #[test]
    fn while_there_is_room_nearly_all_are_kept() {
        let mut cache = Cache::new(1 << 24);
        (0..20_000).for_each(|number| {
            cache.looked_up(3); // two pieces are found for each new one
            put(&mut cache, number);
        });
        let kept = (0..20_000).filter(|&number| found(&mut cache, &piece(number)) == Some(tokens(number))).count();
        assert!(kept > 19_500, "{kept}");
    }

    #[test]
    fn long_pieces_of_one_key_are_told_apart() {
        let mut cache = Cache::new(0);
        let key = Key::long(b"a long piece of text");
        cache.put(key, key.hash(), b"a long piece of text", &[1, 2]);
        let mut ids = Vec::new();
        assert!(!get(&mut cache, key, b"a long piece of toxt", &mut ids));
        assert!(get(&mut cache, key, b"a long piece of text", &mut ids));
        assert_eq!(ids, [1, 2]);
    }

    #[test]
    fn very_long_pieces_are_not_kept() {
        let mut cache = Cache::new(1 << 20);
        let piece = [b'a'; 2000];
        cache.put(Key::of(&piece, 0..piece.len()), Key::of(&piece, 0..piece.len()).hash(), &piece, &[1]);
        assert_eq!(found(&mut cache, &piece), None);
    }

    #[test]
    fn it_grows_only_where_pieces_repeat() {
        for (lookups, grows) in [(1, false), (3, true)] {
            let mut cache = Cache::new(1 << 24);
            for number in 0..20_000 {
                cache.looked_up(lookups);
                put(&mut cache, number);
            }
            assert_eq!(cache.places.len() > FIRST_PLACES, grows, "{lookups} lookups for each new piece");
        }
    }
}
