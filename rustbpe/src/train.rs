//! Learning merges: again and again the most frequent pair, of equals the one with the smallest ids.
//!
//! A pair can come into being only in the merge that makes the newer of its two tokens; afterwards its count can only
//! fall. Three things follow. The places of a pair are written once, at that moment, one after another. The queue may
//! hold old counts: an entry is looked at when it comes up and put back lower if its count has fallen. And a pair that
//! is rare when it comes into being need not be known at all until the frequent ones are used up: pairs below a floor
//! are left out, and if the queue runs dry the floor is lowered and all pairs are counted anew. Most pairs are rare, so
//! this keeps the tables small, and changes no merge.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use crate::neighbours::Neighbours;
use crate::prefetch::prefetch;
use crate::words::{Words, EDGE, INTERIOR};
use crate::{key, pair, Error, Pair, PieceCounts, BYTES, MAX_VOCAB_SIZE};

/// The first floor is the count that pairs would have if the text were spread evenly over the vocabulary, divided by
/// this. Measured on text of several languages, the last merge is well above it.
const FLOOR_SHARE: u64 = 64;
/// If that was too high after all, the floor falls by this.
const FLOOR_STEP: u64 = 8;
/// How many places ahead the cells are loaded.
const AHEAD: usize = 16;

/// Learn up to `vocab_size - 256` merges; fewer if the pieces have no pair left. `proceed` is asked before each, with
/// the number of merges so far.
///
/// The merge at index i makes the token 256 + i.
pub fn train(counts: PieceCounts, vocab_size: u32, proceed: impl FnMut(usize) -> bool) -> Result<Vec<Pair>, Error> {
    if !(BYTES..=MAX_VOCAB_SIZE).contains(&vocab_size) {
        return Err(Error::VocabSize { given: vocab_size.into() });
    }
    if vocab_size == BYTES {
        return Ok(Vec::new());
    }
    let words = Words::new(&counts)?;
    drop(counts);
    let floor = words.total() / u64::from(vocab_size) / FLOOR_SHARE;
    learn(words, (vocab_size - BYTES) as usize, floor.max(1), proceed)
}

fn learn(words: Words, most: usize, floor: u64, mut proceed: impl FnMut(usize) -> bool) -> Result<Vec<Pair>, Error> {
    let mut trainer = Trainer::new(words, floor);
    let mut merges = Vec::new();
    while merges.len() < most {
        if !proceed(merges.len()) {
            return Err(Error::Stopped);
        }
        let Some((best, places)) = trainer.most_frequent() else { break };
        trainer.merge(best, places);
        merges.push(best);
    }
    Ok(merges)
}

/// Where a pair occurs or once occurred: a range of a block of places, ascending.
#[derive(Clone, Copy)]
struct Places {
    block: u32,
    start: u32,
    length: u32,
}

struct Known {
    count: u64,
    places: Places,
}

struct Trainer {
    words: Words,
    /// All pairs whose count is at least `floor`.
    pairs: HashMap<u64, Known>,
    floor: u64,
    /// Highest count first, then the smallest pair. Counts may be out of date, never too low.
    queue: BinaryHeap<(u64, Reverse<u64>)>,
    blocks: Vec<Box<[u32]>>,
    left: Neighbours,
    right: Neighbours,
}

impl Trainer {
    fn new(words: Words, floor: u64) -> Self {
        let (left, right) = (Neighbours::default(), Neighbours::default());
        let (pairs, queue, blocks) = (HashMap::new(), BinaryHeap::new(), Vec::new());
        let mut trainer = Self { words, pairs, floor, queue, blocks, left, right };
        trainer.count_all();
        trainer
    }

    /// Take out the pair to merge next.
    fn most_frequent(&mut self) -> Option<(Pair, Places)> {
        loop {
            while let Some((count, Reverse(key))) = self.queue.pop() {
                match self.pairs.get(&key) {
                    Some(known) if known.count == count => {
                        let places = known.places;
                        self.pairs.remove(&key);
                        return Some((pair(key), places));
                    }
                    Some(known) => self.queue.push((known.count, Reverse(key))),
                    None => {} // below the floor since
                }
            }
            if self.floor == 1 {
                return None;
            }
            self.floor = (self.floor / FLOOR_STEP).max(1);
            self.count_all();
        }
    }

    /// Find the pairs that reach the floor, with their counts and places, when none is known.
    fn count_all(&mut self) {
        let Self { words, pairs, floor, queue, blocks, .. } = self;
        // Sums over pairs that share a hash are never too low, and so tell most rare pairs with little memory.
        const SUMS: usize = 1 << 18;
        let hash = |key: u64| (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46) as usize % SUMS;
        let mut sums = vec![0u64; SUMS];
        words.for_each_pair(|_, pair, weight| sums[hash(key(pair))] += u64::from(weight));
        words.for_each_pair(|_, pair, weight| {
            let key = key(pair);
            if sums[hash(key)] >= *floor {
                let none = Places { block: 0, start: 0, length: 0 };
                let known = pairs.entry(key).or_insert(Known { count: 0, places: none });
                known.count += u64::from(weight);
                known.places.length += 1;
            }
        });
        pairs.retain(|_, known| known.count >= *floor);
        let mut end = 0;
        for known in pairs.values_mut() {
            (known.places.start, known.places.length) = (end, end + known.places.length);
            end = known.places.length;
            known.places.length = 0;
        }
        let mut block = vec![0; end as usize].into_boxed_slice();
        words.for_each_pair(|place, pair, _| {
            if let Some(known) = pairs.get_mut(&key(pair)) {
                block[(known.places.start + known.places.length) as usize] = place;
                known.places.length += 1;
            }
        });
        *blocks = vec![block];
        queue.extend(pairs.iter().map(|(&key, known)| (known.count, Reverse(key))));
    }

    fn merge(&mut self, merged: Pair, places: Places) {
        let lengths = &mut self.words.lengths;
        let token = lengths.len() as u32;
        lengths.push(lengths[merged.0 as usize] + lengths[merged.1 as usize]);
        self.left.reset(lengths.len());
        self.right.reset(lengths.len());
        let (twins, twins_weight) = self.replace(merged, places, token);

        for index in 0..self.left.tokens.len() {
            let neighbour = self.left.tokens[index];
            let weight = self.left.of(neighbour).weight;
            self.lower((neighbour, merged.0), weight);
        }
        for index in 0..self.right.tokens.len() {
            let neighbour = self.right.tokens[index];
            let weight = self.right.of(neighbour).weight;
            self.lower((merged.1, neighbour), weight);
        }
        if twins > 0 {
            // These stood before a `merged.0` that has itself become `token`: their right neighbour is the new one.
            let before = self.right.of(merged.0);
            before.weight -= twins_weight;
            before.number -= twins;
            self.right.add_sum(token, twins_weight, twins);
        }
        self.register(token);
    }

    /// Write `token` over every occurrence of the pair and note the neighbours.
    ///
    /// Returns how many occurrences are followed directly by another one, and their weight. In `right.found` these
    /// have `token` as the neighbour, in the sums of `right` still the left half of the pair.
    fn replace(&mut self, (first, second): Pair, places: Places, token: u32) -> (u32, u64) {
        let Self { words: Words { cells, lengths }, blocks, left, right, .. } = self;
        let (first_length, second_length) = (lengths[first as usize] as usize, lengths[second as usize] as usize);
        let places = &blocks[places.block as usize][places.start as usize..][..places.length as usize];
        let (mut twins, mut twins_weight) = (0, 0);
        for (index, &place) in places.iter().enumerate() {
            if let Some(&later) = places.get(index + AHEAD) {
                prefetch(cells, later as usize);
            }
            let place = place as usize;
            let middle = place + first_length;
            // Since the place was noted, another merge may have taken one half.
            if cells[place].symbol != first || cells[middle].symbol != second {
                continue;
            }
            let end = middle + second_length;
            let weight = cells[place].weight;
            let before = cells[place - 1].symbol;
            if before == token | INTERIOR {
                // The occurrence before this one ends here, and was the last to note a right neighbour: our `first`.
                if let Some(last) = right.found.last_mut() {
                    last.0 = token;
                }
                twins += 1;
                twins_weight += u64::from(weight);
            } else if before != EDGE {
                left.add(before & !INTERIOR, weight, place);
            }
            let after = cells[end].symbol;
            if after != EDGE {
                right.add(after, weight, place);
            }
            cells[middle].symbol |= INTERIOR;
            cells[place].symbol = token;
            cells[end - 1].symbol = token | INTERIOR;
        }
        (twins, twins_weight)
    }

    /// Take `weight` occurrences from a pair. The pair being merged is no longer known: in a run it is its own
    /// neighbour.
    fn lower(&mut self, old: Pair, weight: u64) {
        let key = key(old);
        if let Some(known) = self.pairs.get_mut(&key) {
            debug_assert!(known.count >= weight);
            known.count = known.count.saturating_sub(weight);
            if known.count < self.floor {
                self.pairs.remove(&key);
            }
        }
    }

    /// Enter the pairs that `token` makes with its neighbours, with their counts and places, if they reach the floor.
    fn register(&mut self, token: u32) {
        let Self { words, pairs, floor, queue, blocks, left, right } = self;
        let block = blocks.len() as u32;
        let mut end = 0;
        let mut enter = |neighbours: &mut Neighbours, make: &dyn Fn(u32) -> Pair| {
            for index in 0..neighbours.tokens.len() {
                let neighbour = neighbours.tokens[index];
                let sum = neighbours.of(neighbour);
                if sum.weight < *floor {
                    sum.number = 0; // for the second round: not entered
                    continue;
                }
                let places = Places { block, start: end, length: sum.number };
                sum.next = end;
                end += sum.number;
                let key = key(make(neighbour));
                pairs.insert(key, Known { count: sum.weight, places });
                queue.push((sum.weight, Reverse(key)));
            }
        };
        enter(left, &|neighbour| (neighbour, token));
        enter(right, &|neighbour| (token, neighbour));
        if end == 0 {
            return;
        }
        let mut new = vec![0; end as usize].into_boxed_slice();
        let mut note = |neighbours: &mut Neighbours, back: &dyn Fn(u32) -> u32| {
            for index in 0..neighbours.found.len() {
                let (neighbour, place) = neighbours.found[index];
                let sum = neighbours.of(neighbour);
                if sum.number > 0 {
                    new[sum.next as usize] = place - back(neighbour);
                    sum.next += 1;
                }
            }
        };
        note(left, &|neighbour| words.lengths[neighbour as usize]);
        note(right, &|_| 0);
        blocks.push(new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{naive_merges, random_text, Random};

    fn counted(pieces: &[(&str, u64)]) -> PieceCounts {
        let mut counts = PieceCounts::new();
        pieces.iter().for_each(|(piece, count)| counts.add(piece.as_bytes(), *count));
        counts
    }

    fn merges(pieces: &[(&str, u64)], vocab_size: u32) -> Vec<Pair> {
        train(counted(pieces), vocab_size, |_| true).unwrap()
    }

    #[test]
    fn the_most_frequent_pair_comes_first_and_of_equals_the_smallest() {
        assert_eq!(merges(&[("ab", 10), ("cd", 5)], 257), [(97, 98)]);
        assert_eq!(merges(&[("cd", 5), ("zb", 5), ("ad", 5)], 300), [(97, 100), (99, 100), (122, 98)]);
    }

    #[test]
    fn runs_of_one_letter_merge_from_the_left() {
        assert_eq!(merges(&[("aaaaa", 1)], 300), [(97, 97), (256, 97), (256, 257)]);
        assert_eq!(merges(&[("aaaa", 3), ("aaa", 2)], 300), [(97, 97), (256, 256), (256, 97)]);
    }

    #[test]
    fn training_ends_early_when_no_pair_is_left() {
        assert!(merges(&[("a", 10), ("b", 3)], 1000).is_empty());
        assert!(merges(&[], 1000).is_empty());
        assert_eq!(merges(&[("abc", 1)], 1000).len(), 2);
    }

    #[test]
    fn counts_beyond_32_bits_are_exact() {
        let huge = 3 * u64::from(u32::MAX);
        let pieces = [("ab", huge + 1), ("cd", huge), ("ce", 2)];
        assert_eq!(merges(&pieces, 300), [(97, 98), (99, 100), (99, 101)]);
    }

    #[test]
    fn vocabulary_sizes_out_of_range_are_errors() {
        for size in [0, 255, MAX_VOCAB_SIZE + 1] {
            assert_eq!(train(PieceCounts::new(), size, |_| true), Err(Error::VocabSize { given: size.into() }));
        }
    }

    #[test]
    fn the_caller_can_stop_it() {
        let mut counts = PieceCounts::new();
        counts.add(b"abcdef", 1);
        let mut left = 2;
        let proceed = |_| {
            left -= 1;
            left >= 0
        };
        assert_eq!(train(counts, 300, proceed), Err(Error::Stopped));
    }

    #[test]
    fn merges_equal_a_naive_trainer_on_random_texts() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let alphabet = ["a", "ab", "abc", "abcdefgh", "汉字说", "a汉😀"][random.below(6)];
            let pieces: Vec<(String, u64)> = (0..1 + random.below(12))
                .map(|_| (random_text(&mut random, alphabet, 40), 1 + random.below(4) as u64))
                .collect();
            let pieces: Vec<(&str, u64)> = pieces.iter().map(|(piece, count)| (piece.as_str(), *count)).collect();
            let expected = naive_merges(&pieces, 100);
            assert_eq!(merges(&pieces, 356), expected, "seed {seed}: {pieces:?}");
            for floor in [2, 3, 9, 100] {
                let words = Words::new(&counted(&pieces)).unwrap();
                assert_eq!(learn(words, 100, floor, |_| true).unwrap(), expected, "floor {floor}, seed {seed}");
            }
        }
    }
}
