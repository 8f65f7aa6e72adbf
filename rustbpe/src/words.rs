//! All distinct pieces in one array, in which bytes are merged to tokens.
//!
//! There is one cell per byte, so tokens never move: the first cell of a token holds its id, the last cell holds the id
//! again with a mark, so that it can be found from the right, and the cells between only have the mark.

use crate::{Error, Pair, PieceCounts};

/// Marks a cell that is not the first one of its token.
pub const INTERIOR: u32 = 1 << 31;
/// The symbol before and after every piece.
pub const EDGE: u32 = u32::MAX;

#[derive(Clone, Copy)]
pub struct Cell {
    pub symbol: u32,
    /// How often the piece of this cell occurs. A piece whose count needs more than 32 bits is laid out several times.
    pub weight: u32,
}

/// The pieces, and the lengths of all tokens.
pub struct Words {
    pub cells: Vec<Cell>,
    /// The number of bytes of each token.
    pub lengths: Vec<u32>,
}

impl Words {
    /// Lay out every piece of at least two bytes, with edges around it.
    pub fn new(counts: &PieceCounts) -> Result<Self, Error> {
        // A piece whose count needs more than 32 bits is laid out several times, and the weights add up to its count.
        let copies = |count: u64| count.div_ceil(u64::from(u32::MAX));
        let mut bytes = 1;
        counts.for_each(|piece, count| {
            if piece.len() >= 2 {
                bytes += (piece.len() as u64 + 1) * copies(count);
            }
        });
        if bytes > u64::from(u32::MAX) {
            return Err(Error::TooMuchText { bytes });
        }
        let mut cells = Vec::with_capacity(bytes as usize);
        cells.push(Cell { symbol: EDGE, weight: 0 });
        counts.for_each(|piece, mut count| {
            while piece.len() >= 2 && count > 0 {
                let weight = u32::try_from(count).unwrap_or(u32::MAX);
                cells.extend(piece.iter().map(|&byte| Cell { symbol: byte.into(), weight }));
                cells.push(Cell { symbol: EDGE, weight: 0 });
                count -= u64::from(weight);
            }
        });
        Ok(Self { cells, lengths: vec![1; crate::BYTES as usize] })
    }

    /// The number of bytes in all occurrences of the pieces: each piece's bytes times its count.
    pub fn total(&self) -> u64 {
        self.cells.iter().map(|cell| u64::from(cell.weight)).sum()
    }

    /// Call `take` with the place, the pair and the weight of every two neighbouring tokens.
    pub fn for_each_pair(&self, mut take: impl FnMut(u32, Pair, u32)) {
        let mut place = 0;
        while place < self.cells.len() {
            let Cell { symbol, weight } = self.cells[place];
            if symbol == EDGE {
                place += 1;
                continue;
            }
            let next = place + self.lengths[symbol as usize] as usize;
            let right = self.cells[next].symbol;
            if right != EDGE {
                take(place as u32, (symbol, right), weight);
            }
            place = next;
        }
    }
}
