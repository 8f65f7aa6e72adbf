//! How often each distinct piece occurs, counted on all threads of the current rayon pool.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};
use rayon::prelude::*;

use crate::{Error, Splitter};

/// Tables that are filled side by side when the threads' counts are added up.
const SHARDS: usize = 64;
/// A thread gets at least this much text at a time.
const MIN_GROUP_BYTES: usize = 1 << 17;

/// Distinct pieces with their counts. Nothing that is made from it depends on its order, which is arbitrary.
pub struct PieceCounts {
    hasher: DefaultHashBuilder,
    shards: Vec<Shard>,
}

/// Pieces lie one after another in `bytes`: no allocation for each.
#[derive(Default)]
struct Shard {
    bytes: Vec<u8>,
    entries: HashTable<Entry>,
}

struct Entry {
    hash: u64,
    start: usize,
    length: usize,
    count: u64,
}

/// What one thread counted in its group of texts, by shard.
type Counted<'t> = Vec<Vec<(u64, &'t [u8], u64)>>;

impl PieceCounts {
    pub fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { hasher: DefaultHashBuilder::default(), shards }
    }

    /// Split `texts` and count their pieces. On an error nothing is counted, and the first failing text is named.
    pub fn add_texts(&mut self, texts: &[&str], splitter: &Splitter) -> Result<(), (usize, Error)> {
        let counted = groups(texts)
            .into_par_iter()
            .map_init(|| splitter.clone(), |splitter, (first, last)| self.count_group(texts, first, last, splitter))
            .collect::<Vec<_>>()
            .into_iter()
            .collect::<Result<Vec<Counted>, _>>()?;
        self.shards.par_iter_mut().enumerate().for_each(|(number, shard)| {
            for group in &counted {
                for &(hash, piece, count) in &group[number] {
                    shard.add(hash, piece, count);
                }
            }
        });
        Ok(())
    }

    /// Add `count` occurrences of one piece.
    pub fn add(&mut self, piece: &[u8], count: u64) {
        let hash = self.hasher.hash_one(piece);
        self.shards[shard_of(hash)].add(hash, piece, count);
    }

    pub fn iter(&self) -> impl Iterator<Item = (&[u8], u64)> + Clone {
        self.shards.iter().flat_map(|shard| {
            shard.entries.iter().map(|entry| (&shard.bytes[entry.start..entry.start + entry.length], entry.count))
        })
    }

    fn count_group<'t>(
        &self,
        texts: &[&'t str],
        first: usize,
        last: usize,
        splitter: &Splitter,
    ) -> Result<Counted<'t>, (usize, Error)> {
        let mut counts: HashTable<(u64, &'t [u8], u64)> = HashTable::new();
        for (number, text) in texts.iter().enumerate().take(last).skip(first) {
            let take = |piece: &'t str| {
                let piece = piece.as_bytes();
                let hash = self.hasher.hash_one(piece);
                counts
                    .entry(hash, |known| known.1 == piece, |known| known.0)
                    .and_modify(|known| known.2 += 1)
                    .or_insert((hash, piece, 1));
            };
            splitter.split(text, take).map_err(|error| (number, error))?;
        }
        let mut by_shard = vec![Vec::new(); SHARDS];
        for counted in counts {
            by_shard[shard_of(counted.0)].push(counted);
        }
        Ok(by_shard)
    }
}

impl Default for PieceCounts {
    fn default() -> Self {
        Self::new()
    }
}

impl Shard {
    fn add(&mut self, hash: u64, piece: &[u8], count: u64) {
        let Self { bytes, entries } = self;
        let same = |entry: &Entry| entry.hash == hash && &bytes[entry.start..entry.start + entry.length] == piece;
        if let Some(entry) = entries.find_mut(hash, same) {
            entry.count += count;
            return;
        }
        let entry = Entry { hash, start: bytes.len(), length: piece.len(), count };
        bytes.extend_from_slice(piece);
        entries.insert_unique(hash, entry, |entry| entry.hash);
    }
}

/// From the middle bits of the hash: the tables themselves use both ends.
fn shard_of(hash: u64) -> usize {
    (hash >> 32) as usize % SHARDS
}

/// Ranges of texts with about the same number of bytes, a few for each thread.
fn groups(texts: &[&str]) -> Vec<(usize, usize)> {
    let bytes: usize = texts.iter().map(|text| text.len()).sum();
    let target = (bytes / (4 * rayon::current_num_threads())).max(MIN_GROUP_BYTES);
    let mut groups = Vec::new();
    let (mut first, mut filled) = (0, 0);
    for (number, text) in texts.iter().enumerate() {
        filled += text.len();
        if filled >= target {
            groups.push((first, number + 1));
            (first, filled) = (number + 1, 0);
        }
    }
    if first < texts.len() {
        groups.push((first, texts.len()));
    }
    groups
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::GPT4_PATTERN;

    fn counted(texts: &[&str]) -> HashMap<Vec<u8>, u64> {
        let mut counts = PieceCounts::new();
        let splitter = Splitter::new(GPT4_PATTERN).unwrap();
        for half in texts.chunks(texts.len() / 2 + 1) {
            counts.add_texts(half, &splitter).unwrap();
        }
        counts.iter().map(|(piece, count)| (piece.to_vec(), count)).collect()
    }

    #[test]
    fn counts_are_those_of_a_plain_map_over_many_groups() {
        let texts: Vec<String> = (0..400).map(|n| format!("text {n} 说 {} ", n % 7).repeat(100)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        assert!(groups(&texts).len() > 1);
        let mut expected: HashMap<Vec<u8>, u64> = HashMap::new();
        for text in &texts {
            let count = |piece: &str| *expected.entry(piece.as_bytes().to_vec()).or_default() += 1;
            Splitter::new(GPT4_PATTERN).unwrap().split(text, count).unwrap();
        }
        assert_eq!(counted(&texts), expected);
    }

    #[test]
    fn groups_cover_all_texts_once() {
        let long = "x".repeat(3 * MIN_GROUP_BYTES);
        for texts in [vec![], vec![""], vec!["a", &long, "b", &long, ""]] {
            let groups = groups(&texts);
            let numbers: Vec<usize> = groups.into_iter().flat_map(|(first, last)| first..last).collect();
            assert_eq!(numbers, (0..texts.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_first_failing_text_is_named_and_nothing_counted() {
        let mut counts = PieceCounts::new();
        let long = "b".repeat(2 * MIN_GROUP_BYTES);
        let failed = counts.add_texts(&["aa", &long, "aa!", &long, "!"], &Splitter::new("a+|b").unwrap());
        assert_eq!(failed, Err((2, Error::NotCovered { character: 2, excerpt: "!".into() })));
        assert_eq!(counts.iter().count(), 0);
    }

    #[test]
    fn counts_hold_more_than_32_bits() {
        let mut counts = PieceCounts::new();
        counts.add(b"ab", u64::from(u32::MAX));
        counts.add(b"ab", 7);
        assert_eq!(counts.iter().collect::<Vec<_>>(), [(b"ab".as_slice(), u64::from(u32::MAX) + 7)]);
    }
}
