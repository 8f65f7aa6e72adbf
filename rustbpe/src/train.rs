//! Learns merges: merges the most frequent pair again and again. Ties go to the pair with the smallest ids.
//!
//! A pair first occurs in the merge that makes the newer of its two tokens, and from then on its count can only fall.
//! Three things follow. First, the places of a pair are written once, at that moment, one after another. Second, the
//! queue may hold outdated counts: when an entry comes up and its count has fallen, it is put back with the new count.
//! Third, a pair that is rare at first can be ignored until the frequent pairs are used up. So pairs below a floor are
//! left out, and when the queue runs empty, the floor is lowered and all pairs are counted again. Most pairs are rare,
//! so this keeps the tables small, and it changes no merge.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use crate::neighbours::{Found, Neighbours, Sum};
use crate::prefetch::prefetch;
use crate::words::{Words, EDGE, INTERIOR};
use crate::{key, pair, Error, Pair, PieceCounts, BYTES, MAX_VOCAB_SIZE};

/// The first floor is the count that each pair would have if the text were spread evenly over the vocabulary, divided
/// by this number. On large texts in several languages, the last merge is above the floor.
const FLOOR_SHARE: u64 = 16;
/// If the floor was too high after all, it is divided by this number. On a small text this happens once or twice, which
/// takes less time than to keep all pairs above a lower floor.
const FLOOR_STEP: u64 = 2;
/// How many places ahead the cells are prefetched.
const AHEAD: usize = 16;

/// Learn up to `vocab_size - 256` merges, or fewer if no pair is left in the pieces. The merge at index i makes token
/// 256 + i.
///
/// `proceed` is called before each merge with the number of merges so far; if it returns false, training stops.
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

/// Where a pair occurs or once occurred: a range in a block of ascending places.
#[derive(Clone, Copy)]
struct Places {
    block: u32,
    start: u32,
    length: u32,
}

impl Places {
    /// Set room in a block aside for the places of a pair. The room begins at `end`, which is moved behind it.
    fn after(end: &mut u32, block: u32, sum: &mut Sum) -> Self {
        let places = Self { block, start: *end, length: sum.number };
        sum.next = *end;
        *end += sum.number;
        places
    }
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
    /// Highest count first, then the smallest pair. A count may be outdated, and then it is too high.
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
        trainer.count_bytes();
        trainer
    }

    /// Find the pairs of bytes that reach the floor, with their counts and places. Nothing is merged yet.
    fn count_bytes(&mut self) {
        let Self { words, pairs, floor, queue, blocks, .. } = self;
        // Edges count as one more byte value here, so that no cell needs a branch.
        let index = |left: u32, right: u32| (left.min(BYTES) * (BYTES + 1) + right.min(BYTES)) as usize;
        let mut sums = vec![Sum::default(); index(BYTES, BYTES) + 1];
        for pair in words.cells.windows(2) {
            let sum = &mut sums[index(pair[0].symbol, pair[1].symbol)];
            sum.weight += u64::from(pair[0].weight);
            sum.number += 1;
        }
        let mut end = 0;
        for (left, right) in (0..=BYTES).flat_map(|left| (0..=BYTES).map(move |right| (left, right))) {
            let sum = &mut sums[index(left, right)];
            if sum.weight < *floor || left.max(right) == BYTES {
                sum.number = 0;
                continue;
            }
            pairs.insert(key((left, right)), Known { count: sum.weight, places: Places::after(&mut end, 0, sum) });
        }
        let mut block = vec![0; end as usize].into_boxed_slice();
        for (pair, place) in words.cells.windows(2).zip(0..) {
            sums[index(pair[0].symbol, pair[1].symbol)].put(&mut block, place);
        }
        blocks.push(block);
        queue.extend(pairs.iter().map(|(&key, known)| (known.count, Reverse(key))));
    }

    /// Remove and return the pair to merge next.
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
                    None => {} // its count has fallen below the floor
                }
            }
            if self.floor == 1 {
                return None;
            }
            self.floor = (self.floor / FLOOR_STEP).max(1);
            self.count_all();
        }
    }

    /// Find all pairs that reach the floor, with their counts and places, when no pair is left.
    fn count_all(&mut self) {
        let Self { words, pairs, floor, queue, blocks, .. } = self;
        // A sum over all pairs with the same hash is never too low, so it rules out most rare pairs with little memory.
        const ROUGH: usize = 1 << 18;
        let hash = |key: u64| (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46) as usize % ROUGH;
        let mut rough = vec![0u64; ROUGH];
        words.for_each_pair(|_, pair, weight| rough[hash(key(pair))] += u64::from(weight));
        let mut sums: HashMap<u64, Sum> = HashMap::new();
        words.for_each_pair(|_, pair, weight| {
            let key = key(pair);
            if rough[hash(key)] >= *floor {
                let sum = sums.entry(key).or_default();
                sum.weight += u64::from(weight);
                sum.number += 1;
            }
        });
        sums.retain(|_, sum| sum.weight >= *floor);
        let mut end = 0;
        for (&key, sum) in &mut sums {
            pairs.insert(key, Known { count: sum.weight, places: Places::after(&mut end, 0, sum) });
        }
        let mut block = vec![0; end as usize].into_boxed_slice();
        words.for_each_pair(|place, pair, _| {
            if let Some(sum) = sums.get_mut(&key(pair)) {
                sum.put(&mut block, place);
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
        let between = self.replace(merged, places, token);
        self.left.sum_up();
        self.right.sum_up();

        for index in 0..self.left.tokens.len() {
            let neighbour = self.left.tokens[index];
            let weight = self.left.of(neighbour).weight;
            self.lower((neighbour, merged.0), weight);
        }
        for index in 0..self.right.tokens.len() {
            let neighbour = self.right.tokens[index];
            let weight = self.right.of(neighbour).weight;
            self.lower((merged.1, neighbour), weight); // occurrences that are now pairs with the new token
        }
        self.lower((merged.1, merged.0), between);
        self.register(token);
    }

    /// Replace every occurrence of the pair by `token`, and note the neighbours.
    ///
    /// Where one occurrence directly follows another, the two become neighbours, and both are the new token. Returns
    /// the weight of the old pairs that were between two such occurrences.
    fn replace(&mut self, (first, second): Pair, places: Places, token: u32) -> u64 {
        let Self { words: Words { cells, lengths }, blocks, left, right, .. } = self;
        let (first_length, second_length) = (lengths[first as usize] as usize, lengths[second as usize] as usize);
        let places = &blocks[places.block as usize][places.start as usize..][..places.length as usize];
        let mut between = 0;
        for (index, &place) in places.iter().enumerate() {
            if let Some(&later) = places.get(index + AHEAD) {
                prefetch(cells, later as usize);
                prefetch(cells, later as usize + first_length + second_length); // often in another cache line
            }
            let place = place as usize;
            let middle = place + first_length;
            // Another merge may have changed this place since it was noted.
            if cells[place].symbol != first || cells[middle].symbol != second {
                continue;
            }
            let end = middle + second_length;
            let weight = cells[place].weight;
            let before = cells[place - 1].symbol;
            if before == token | INTERIOR {
                // The previous occurrence ends here, and it has just noted our `first` as its right neighbour.
                if let Some(last) = right.found.last_mut() {
                    last.token = token;
                }
                between += u64::from(weight);
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
        between
    }

    /// Subtract `weight` from the count of a pair. The pair may be unknown: it may be below the floor, or be the merged
    /// pair itself, which in a run is its own neighbour.
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

    /// Enter the pairs of `token` and its neighbours that reach the floor, with their counts and places.
    fn register(&mut self, token: u32) {
        let Self { words, pairs, floor, queue, blocks, left, right } = self;
        let block = blocks.len() as u32;
        let mut end = 0;
        let mut enter = |neighbours: &mut Neighbours, make: &dyn Fn(u32) -> Pair| {
            for index in 0..neighbours.tokens.len() {
                let neighbour = neighbours.tokens[index];
                let sum = neighbours.of(neighbour);
                if sum.weight < *floor {
                    sum.number = 0; // tells `note` below that this pair was not entered
                    continue;
                }
                let key = key(make(neighbour));
                pairs.insert(key, Known { count: sum.weight, places: Places::after(&mut end, block, sum) });
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
                let Found { token, place, .. } = neighbours.found[index];
                neighbours.of(token).put(&mut new, place - back(token));
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
