//! Learning merges: again and again join the most frequent pair, of equals the one with the smallest ids.
//!
//! All distinct pieces lie in one array, one cell per byte, so that a token's place never moves: its first cell
//! holds its id, its last cell the id again with a mark (to find it from the right), and the cells between are
//! only marked. A pair can come into being only in the merge that makes the newer of its two tokens; afterwards its
//! count can only fall. So the places of a pair are written once, at that moment, and the queue may hold old counts:
//! an entry is looked at when it comes up and put back lower if its count has fallen.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use crate::{key, pair, Error, Pair, PieceCounts, BYTES, MAX_VOCAB_SIZE};

/// Marks a cell that is not the first of its token.
const INTERIOR: u32 = 1 << 31;
/// Stands before and after every piece.
const EDGE: u32 = u32::MAX;

/// Learn up to `vocab_size - 256` merges; fewer if the pieces have no pair left. `proceed` is asked before each.
///
/// The merge at index i makes the token 256 + i.
pub fn train(counts: PieceCounts, vocab_size: u32, mut proceed: impl FnMut() -> bool) -> Result<Vec<Pair>, Error> {
    if !(BYTES..=MAX_VOCAB_SIZE).contains(&vocab_size) {
        return Err(Error::VocabSize { given: vocab_size.into() });
    }
    let cells = lay_out(&counts)?;
    drop(counts);
    let mut trainer = Trainer::new(cells);
    let mut merges = Vec::new();
    while merges.len() < (vocab_size - BYTES) as usize {
        if !proceed() {
            return Err(Error::Stopped);
        }
        let Some((best, places)) = trainer.most_frequent() else { break };
        trainer.merge(best, places);
        merges.push(best);
    }
    Ok(merges)
}

#[derive(Clone, Copy)]
struct Cell {
    symbol: u32,
    /// How often the piece of this cell occurs. A more frequent piece is laid out several times.
    weight: u32,
}

/// Where a pair occurs or once occurred: a range of `postings[newer token]`, places ascending.
#[derive(Clone, Copy)]
struct Places {
    start: u32,
    length: u32,
}

struct Known {
    count: u64,
    places: Places,
}

struct Trainer {
    cells: Vec<Cell>,
    /// Bytes of each token.
    lengths: Vec<u32>,
    pairs: HashMap<u64, Known>,
    /// Highest count first, then the smallest pair. Counts may be out of date, never too low.
    queue: BinaryHeap<(u64, Reverse<u64>)>,
    /// Index 0: places of pairs of bytes; index i: those of pairs whose newer token is 255 + i.
    postings: Vec<Box<[u32]>>,
    left: Neighbours,
    right: Neighbours,
}

/// What stood on one side of the occurrences of the pair being merged.
#[derive(Default)]
struct Neighbours {
    /// Sum of weights by token.
    weight: Vec<u64>,
    /// Number of occurrences by token, later the next free index of its postings.
    number: Vec<u32>,
    /// The tokens that occurred.
    tokens: Vec<u32>,
    /// (token, place of the pair that it makes with the new token).
    found: Vec<(u32, u32)>,
}

impl Neighbours {
    fn reset(&mut self, vocab_size: usize) {
        for &token in &self.tokens {
            self.weight[token as usize] = 0;
            self.number[token as usize] = 0;
        }
        self.tokens.clear();
        self.found.clear();
        self.weight.resize(vocab_size, 0);
        self.number.resize(vocab_size, 0);
    }

    fn add(&mut self, token: u32, weight: u32, place: usize) {
        let index = token as usize;
        if self.weight[index] == 0 {
            self.tokens.push(token);
        }
        self.weight[index] += u64::from(weight);
        self.number[index] += 1;
        self.found.push((token, place as u32));
    }
}

/// One cell per byte of every piece that can have a pair, edges around.
fn lay_out(counts: &PieceCounts) -> Result<Vec<Cell>, Error> {
    // A piece with a count beyond 32 bits is laid out as several pieces whose counts add up.
    let copies = |count: u64| count.div_ceil(u64::from(u32::MAX));
    let pieces = counts.iter().filter(|(piece, count)| piece.len() >= 2 && *count > 0);
    let bytes = 1 + pieces.clone().map(|(piece, count)| (piece.len() as u64 + 1) * copies(count)).sum::<u64>();
    if bytes > u64::from(u32::MAX) {
        return Err(Error::TooMuchText { bytes });
    }
    let mut cells = Vec::with_capacity(bytes as usize);
    cells.push(Cell { symbol: EDGE, weight: 0 });
    for (piece, mut count) in pieces {
        while count > 0 {
            let weight = u32::try_from(count).unwrap_or(u32::MAX);
            cells.extend(piece.iter().map(|&byte| Cell { symbol: byte.into(), weight }));
            cells.push(Cell { symbol: EDGE, weight: 0 });
            count -= u64::from(weight);
        }
    }
    Ok(cells)
}

/// Counts and places of the pairs of bytes, the places ordered by pair.
fn byte_pairs(cells: &[Cell]) -> (HashMap<u64, Known>, Box<[u32]>) {
    let neighbours = || {
        let both = |pair: &[Cell]| pair[0].symbol != EDGE && pair[1].symbol != EDGE;
        let numbered = cells.windows(2).enumerate().filter(move |(_, pair)| both(pair));
        numbered.map(|(place, pair)| (place as u32, (pair[0].symbol << 8 | pair[1].symbol) as usize, pair[0].weight))
    };
    let mut count = vec![0u64; 1 << 16];
    let mut next = vec![0u32; 1 << 16];
    for (_, pair, weight) in neighbours() {
        count[pair] += u64::from(weight);
        next[pair] += 1;
    }
    let mut pairs = HashMap::new();
    let mut start = 0;
    for pair in 0..1 << 16 {
        let places = Places { start, length: next[pair] };
        next[pair] = start;
        start += places.length;
        if count[pair] > 0 {
            pairs.insert(key((pair as u32 >> 8, pair as u32 & 255)), Known { count: count[pair], places });
        }
    }
    let mut postings = vec![0; start as usize].into_boxed_slice();
    for (place, pair, _) in neighbours() {
        postings[next[pair] as usize] = place;
        next[pair] += 1;
    }
    (pairs, postings)
}

impl Trainer {
    fn new(cells: Vec<Cell>) -> Self {
        let (pairs, postings) = byte_pairs(&cells);
        let queue = pairs.iter().map(|(&key, known)| (known.count, Reverse(key))).collect();
        let lengths = vec![1; BYTES as usize];
        let (left, right) = (Neighbours::default(), Neighbours::default());
        Self { cells, lengths, pairs, queue, postings: vec![postings], left, right }
    }

    /// Take out the pair to merge next.
    fn most_frequent(&mut self) -> Option<(Pair, Places)> {
        while let Some((count, Reverse(key))) = self.queue.pop() {
            match self.pairs.get(&key) {
                Some(known) if known.count == count => {
                    let places = known.places;
                    self.pairs.remove(&key);
                    return Some((pair(key), places));
                }
                Some(known) => self.queue.push((known.count, Reverse(key))),
                None => {} // merged away by its neighbours
            }
        }
        None
    }

    fn merge(&mut self, merged: Pair, places: Places) {
        let token = self.lengths.len() as u32;
        self.lengths.push(self.lengths[merged.0 as usize] + self.lengths[merged.1 as usize]);
        self.left.reset(self.lengths.len());
        self.right.reset(self.lengths.len());
        let (twins, twins_weight) = self.replace(merged, places, token);

        for index in 0..self.left.tokens.len() {
            let neighbour = self.left.tokens[index];
            self.lower((neighbour, merged.0), self.left.weight[neighbour as usize]);
        }
        for index in 0..self.right.tokens.len() {
            let neighbour = self.right.tokens[index];
            self.lower((merged.1, neighbour), self.right.weight[neighbour as usize]);
        }
        if twins > 0 {
            // These stood before a `merged.0` that has itself become `token`: their right neighbour is the new one.
            self.right.weight[merged.0 as usize] -= twins_weight;
            self.right.number[merged.0 as usize] -= twins;
            self.right.weight[token as usize] = twins_weight;
            self.right.number[token as usize] = twins;
            self.right.tokens.push(token);
        }
        self.register(token);
    }

    /// Write `token` over every occurrence of the pair and note the neighbours.
    ///
    /// Returns how many occurrences are followed directly by another one, and their weight. In `right.found` these
    /// have `token` as the neighbour, in the sums of `right` still the left half of the pair.
    fn replace(&mut self, (first, second): Pair, places: Places, token: u32) -> (u32, u64) {
        let Self { cells, lengths, postings, left, right, .. } = self;
        let (first_length, second_length) = (lengths[first as usize] as usize, lengths[second as usize] as usize);
        let postings = &postings[generation((first, second))];
        let (mut twins, mut twins_weight) = (0, 0);
        for &place in &postings[places.start as usize..][..places.length as usize] {
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
                let neighbour = before & !INTERIOR;
                left.add(neighbour, weight, place - lengths[neighbour as usize] as usize);
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
            if known.count == 0 {
                self.pairs.remove(&key);
            }
        }
    }

    /// Enter the pairs that `token` makes with its neighbours, with their counts and places.
    fn register(&mut self, token: u32) {
        let Self { pairs, queue, postings, left, right, .. } = self;
        let mut new = vec![0; left.found.len() + right.found.len()].into_boxed_slice();
        let mut start = 0;
        let mut enter = |neighbours: &mut Neighbours, make: &dyn Fn(u32) -> Pair| {
            for &neighbour in &neighbours.tokens {
                let (count, next) = (neighbours.weight[neighbour as usize], &mut neighbours.number[neighbour as usize]);
                let places = Places { start, length: *next };
                *next = start;
                start += places.length;
                if count > 0 {
                    let key = key(make(neighbour));
                    pairs.insert(key, Known { count, places });
                    queue.push((count, Reverse(key)));
                }
            }
            for &(neighbour, place) in &neighbours.found {
                let next = &mut neighbours.number[neighbour as usize];
                new[*next as usize] = place;
                *next += 1;
            }
        };
        enter(left, &|neighbour| (neighbour, token));
        enter(right, &|neighbour| (token, neighbour));
        postings.push(new);
    }
}

/// The index in `postings` of a pair: that of its newer token.
fn generation((left, right): Pair) -> usize {
    (left.max(right) + 1).saturating_sub(BYTES) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{naive_merges, random_text, Random};

    fn merges(pieces: &[(&str, u64)], vocab_size: u32) -> Vec<Pair> {
        let mut counts = PieceCounts::new();
        pieces.iter().for_each(|(piece, count)| counts.add(piece.as_bytes(), *count));
        train(counts, vocab_size, || true).unwrap()
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
            assert_eq!(train(PieceCounts::new(), size, || true), Err(Error::VocabSize { given: size.into() }));
        }
    }

    #[test]
    fn the_caller_can_stop_it() {
        let mut counts = PieceCounts::new();
        counts.add(b"abcdef", 1);
        let mut left = 2;
        let proceed = || {
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
            assert_eq!(merges(&pieces, 356), naive_merges(&pieces, 100), "seed {seed}: {pieces:?}");
        }
    }
}
