//! The tokens of short pieces that were met before.
//!
//! Two tables of bounded size. The near one is small enough for the processor's own cache and has what was asked for
//! last: nine of ten pieces of a text. The far one has many more; there a piece may stand at one of two places side by
//! side, which are one line of memory, and a new one takes the place of the one that came first.

use crate::key::Key;
use crate::prefetch::prefetch;

/// Pieces of more tokens are not kept.
pub const MOST_TOKENS: usize = 3;
const NEAR_PLACES: usize = 1 << 13;
const FIRST_LINES: usize = 1 << 9;

#[derive(Clone, Copy)]
struct Place {
    key: Key,
    length: u32,
    ids: [u32; MOST_TOKENS],
}

const EMPTY: Place = Place { key: Key::NONE, length: 0, ids: [0; MOST_TOKENS] };

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([Place; 2]);

/// One thread's cache. It begins small and doubles up to its bound.
pub struct Cache {
    near: Vec<Place>,
    far: Vec<Line>,
    most_lines: usize,
    /// How often a piece has been put in since the table last grew.
    news: usize,
}

impl Cache {
    /// A cache of up to `bytes`, beside the near table.
    pub fn new(bytes: usize) -> Self {
        let most_lines = (bytes / size_of::<Line>()).max(FIRST_LINES);
        Self { near: vec![EMPTY; NEAR_PLACES], far: vec![Line([EMPTY; 2]); FIRST_LINES], most_lines, news: 0 }
    }

    /// Whether a piece is in the near table. If not, the memory where it may stand is asked for, to be there when it is
    /// looked at.
    #[inline]
    pub fn expect(&self, key: Key, hash: u64) -> bool {
        let near = self.near[near_place(hash)].key == key;
        if !near {
            prefetch(&self.far, self.line(hash));
        }
        near
    }

    /// Append the tokens of a piece to `ids`, if they are known.
    #[inline]
    pub fn get(&mut self, key: Key, hash: u64, ids: &mut Vec<u32>) -> bool {
        let near = &self.near[near_place(hash)];
        if near.key == key {
            near.append_to(ids);
            return true;
        }
        let line = self.line(hash);
        let Some(known) = self.far[line].0.iter().find(|place| place.key == key) else { return false };
        known.append_to(ids);
        self.near[near_place(hash)] = *known;
        true
    }

    /// Keep the tokens of a piece; false if they are too many.
    pub fn put(&mut self, key: Key, hash: u64, ids: &[u32]) -> bool {
        if ids.len() > MOST_TOKENS {
            return false;
        }
        self.news += 1;
        if self.news > self.far.len() && 2 * self.far.len() <= self.most_lines {
            self.grow();
        }
        let mut new = Place { key, length: ids.len() as u32, ids: [0; MOST_TOKENS] };
        new.ids[..ids.len()].copy_from_slice(ids);
        self.near[near_place(hash)] = new;
        self.place(new, hash);
        true
    }

    #[inline]
    fn line(&self, hash: u64) -> usize {
        hash as usize & (self.far.len() - 1)
    }

    fn place(&mut self, new: Place, hash: u64) {
        let line = self.line(hash);
        self.far[line].0 = [new, self.far[line].0[0]];
    }

    fn grow(&mut self) {
        let doubled = vec![Line([EMPTY; 2]); 2 * self.far.len()];
        for Line([newer, older]) in std::mem::replace(&mut self.far, doubled) {
            for place in [older, newer] {
                if place.key != Key::NONE {
                    self.place(place, place.key.hash());
                }
            }
        }
        self.news = 0;
    }
}

impl Place {
    #[inline]
    fn append_to(&self, ids: &mut Vec<u32>) {
        if self.length == 1 {
            ids.push(self.ids[0]);
        } else {
            ids.extend_from_slice(&self.ids[..self.length as usize]);
        }
    }
}

/// By bits of the hash that the far table does not use.
#[inline]
fn near_place(hash: u64) -> usize {
    (hash >> 32) as usize % NEAR_PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> Key {
        let piece = number.to_string();
        Key::new(piece.as_bytes(), 0, piece.len())
    }

    fn found(cache: &mut Cache, key: Key) -> Option<Vec<u32>> {
        let (hash, mut ids) = (key.hash(), vec![7]);
        cache.expect(key, hash);
        let known = cache.get(key, hash, &mut ids);
        assert!(ids[0] == 7 && known == (ids.len() > 1));
        known.then(|| ids[1..].to_vec())
    }

    #[test]
    fn it_gives_what_was_put_in_or_nothing_and_stays_in_its_bound() {
        let mut cache = Cache::new(4 * FIRST_LINES * size_of::<Line>());
        let tokens = |number: usize| vec![number as u32; 1 + number % MOST_TOKENS];
        let mut hits = 0;
        for number in 0..20_000 {
            assert!(cache.put(key(number), key(number).hash(), &tokens(number)));
            assert_eq!(found(&mut cache, key(number)), Some(tokens(number)));
            let earlier = number - number.min(700);
            if let Some(ids) = found(&mut cache, key(earlier)) {
                assert_eq!(ids, tokens(earlier));
                hits += 1;
            }
        }
        assert_eq!(cache.far.len(), 4 * FIRST_LINES);
        assert!(hits > 15_000, "{hits}");
    }

    #[test]
    fn long_results_are_not_kept() {
        let mut cache = Cache::new(0);
        assert!(!cache.put(key(7), key(7).hash(), &[1; MOST_TOKENS + 1]));
        assert_eq!(found(&mut cache, key(7)), None);
    }
}
