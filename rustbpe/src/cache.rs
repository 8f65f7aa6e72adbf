//! The tokens of pieces that were met before.
//!
//! One table of bounded size. A piece may stand at one of eight neighbouring places. It takes the first that is free, and
//! when it is asked for it changes places with the one that stands at its first, where the next look finds it. A place
//! holds up to three tokens. If there are more, or if the piece is too long for its key to hold its bytes, what does not
//! fit lies in a [`Store`].

use crate::key::Key;
use crate::prefetch::prefetch;
use crate::store::Store;

/// Tokens that fit in a place.
const TOKENS: usize = 3;
/// Of a length: the ids are those of a record of the store.
const STORED: u32 = u32::MAX;
/// Places where a piece may stand.
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

/// One thread's cache. It begins small and doubles up to its bound.
pub struct Cache {
    places: Vec<Place>,
    most_places: usize,
    /// How often a place has been filled.
    news: usize,
    store: Store,
}

impl Cache {
    /// A cache of up to `bytes`.
    pub fn new(bytes: usize) -> Self {
        let most_places = (bytes / 2 / size_of::<Place>()).max(FIRST_PLACES);
        Self { places: vec![EMPTY; FIRST_PLACES], most_places, news: 0, store: Store::new(bytes / 2) }
    }

    /// Ask for the memory where a piece may stand, to be there when it is looked at.
    #[inline]
    pub fn expect(&self, hash: u64) {
        prefetch(&self.places, self.home(hash));
    }

    /// Append the tokens of a piece to `ids`, if they are known.
    #[inline]
    pub fn get(&mut self, key: Key, hash: u64, piece: &[u8], ids: &mut Vec<u32>) -> bool {
        let home = self.home(hash);
        if self.places[home].key != key {
            let known = |&place: &usize| self.places[place].key == key || self.places[place].key == Key::NONE;
            match (1..WAYS).map(|way| home ^ way).find(known) {
                // What is asked for now will be asked for again: let it be found at once. The other one may thereby come
                // behind a free place, where it is not found: then it is encoded once more.
                Some(found) if self.places[found].key == key => self.places.swap(home, found),
                _ => return false,
            }
        }
        let place = &self.places[home];
        if place.length == STORED {
            return self.store.get(place.ids, if key.is_long() { piece } else { &[] }, ids);
        }
        // All three, whatever their number: that needs no guess of it.
        let end = ids.len() + place.length as usize;
        ids.extend_from_slice(&place.ids);
        ids.truncate(end);
        true
    }

    /// Keep the tokens of a piece.
    pub fn put(&mut self, key: Key, hash: u64, piece: &[u8], ids: &[u32]) {
        let mut new = Place { key, length: ids.len() as u32, ids: [0; TOKENS] };
        if !key.is_long() && ids.len() <= TOKENS {
            new.ids[..ids.len()].copy_from_slice(ids);
        } else {
            let Some(record) = self.store.put(if key.is_long() { piece } else { &[] }, ids) else { return };
            (new.length, new.ids) = (STORED, record);
        }
        self.news += 1;
        if 2 * self.news > self.places.len() && 2 * self.places.len() <= self.most_places {
            self.grow();
        }
        self.place(new, hash);
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        hash as usize & (self.places.len() - 1)
    }

    /// Where it is free, else in the place of any of those that stand there.
    fn place(&mut self, new: Place, hash: u64) {
        let home = self.home(hash);
        let free = (0..WAYS).map(|way| home ^ way).find(|&place| {
            let known = self.places[place].key;
            known == Key::NONE || known == new.key
        });
        self.places[free.unwrap_or(home ^ (self.news % WAYS))] = new;
    }

    fn grow(&mut self) {
        let doubled = vec![EMPTY; 2 * self.places.len()];
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
    use crate::key::LONGEST_KEY;

    /// Every third is too long for its key.
    fn piece(number: usize) -> Vec<u8> {
        number.to_string().repeat(if number % 3 == 0 { 10 } else { 1 }).into_bytes()
    }

    fn tokens(number: usize) -> Vec<u32> {
        vec![number as u32; 1 + number % 7]
    }

    fn key(piece: &[u8]) -> Key {
        if piece.len() > LONGEST_KEY {
            Key::long(piece)
        } else {
            Key::new(piece, 0, piece.len())
        }
    }

    fn put(cache: &mut Cache, number: usize) {
        let piece = piece(number);
        cache.put(key(&piece), key(&piece).hash(), &piece, &tokens(number));
    }

    fn found(cache: &mut Cache, piece: &[u8]) -> Option<Vec<u32>> {
        let (key, mut ids) = (key(piece), vec![7]);
        cache.expect(key.hash());
        let known = cache.get(key, key.hash(), piece, &mut ids);
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
        (0..20_000).for_each(|number| put(&mut cache, number));
        let kept = (0..20_000).filter(|&number| found(&mut cache, &piece(number)) == Some(tokens(number))).count();
        assert!(kept > 19_500, "{kept}");
    }

    #[test]
    fn long_pieces_of_one_key_are_told_apart() {
        let mut cache = Cache::new(0);
        let key = Key::long(b"a long piece of text");
        cache.put(key, key.hash(), b"a long piece of text", &[1, 2]);
        let mut ids = Vec::new();
        assert!(!cache.get(key, key.hash(), b"a long piece of toxt", &mut ids));
        assert!(cache.get(key, key.hash(), b"a long piece of text", &mut ids));
        assert_eq!(ids, [1, 2]);
    }

    #[test]
    fn very_long_pieces_are_not_kept() {
        let mut cache = Cache::new(1 << 20);
        let piece = [b'a'; 2000];
        cache.put(key(&piece), key(&piece).hash(), &piece, &[1]);
        assert_eq!(found(&mut cache, &piece), None);
    }
}
