//! One table that tells the character classes of a code point, as far as split patterns ask for them.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};

/// `\p{L}`
pub const LETTER: u8 = 1;
/// `\p{N}`
pub const NUMBER: u8 = 2;
/// `\s`
pub const SPACE: u8 = 4;
/// `[\r\n]`
pub const NEWLINE: u8 = 8;
/// `\p{Han}`
pub const HAN: u8 = 16;

const BLOCK: usize = 128;
const BLOCKS: usize = 0x11_0000 / BLOCK;

/// A table of two stages: the block of a code point, then its flags within the block. Equal blocks are stored once.
pub struct Classes {
    ascii: [u8; BLOCK],
    blocks: Vec<u16>,
    flags: Vec<[u8; BLOCK]>,
}

impl Classes {
    /// The table. It is made at first use from the tables of the regular expression engine, so the two always agree.
    pub fn get() -> &'static Self {
        static TABLE: OnceLock<Classes> = OnceLock::new();
        TABLE.get_or_init(Self::new)
    }

    fn new() -> Self {
        let mut classes =
            [(r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE), (r"[\r\n]", NEWLINE), (r"\p{Han}", HAN)]
                .map(|(class, flag)| (ranges(class).into_iter().peekable(), flag));
        let mut table = Self { ascii: [0; BLOCK], blocks: Vec::with_capacity(BLOCKS), flags: Vec::new() };
        for first in (0..BLOCKS).map(|number| BLOCK * number) {
            let mut block = [0; BLOCK];
            for (ranges, flag) in &mut classes {
                while let Some(&(from, to)) = ranges.peek().filter(|(from, _)| *from < first + BLOCK) {
                    block[from.max(first) - first..=to.min(first + BLOCK - 1) - first]
                        .iter_mut()
                        .for_each(|flags| *flags |= *flag);
                    if to >= first + BLOCK {
                        break;
                    }
                    ranges.next();
                }
            }
            // Most blocks equal the one before them.
            let last = table.blocks.last().map(|&number| usize::from(number));
            let known = last.filter(|&number| table.flags[number] == block);
            let known = known.or_else(|| table.flags.iter().position(|known| *known == block));
            let number = known.unwrap_or_else(|| {
                table.flags.push(block);
                table.flags.len() - 1
            });
            table.blocks.push(number as u16);
        }
        table.ascii = table.flags[0];
        table
    }

    #[inline]
    pub fn of(&self, code_point: u32) -> u8 {
        let code_point = code_point as usize;
        self.flags[self.blocks[code_point / BLOCK] as usize][code_point % BLOCK]
    }

    /// The flags of the character that starts at `at`, and its length in bytes. `text` must be UTF-8.
    #[inline(always)]
    pub fn at(&self, text: &[u8], at: usize) -> (u8, usize) {
        match text[at] {
            byte @ 0..0x80 => (self.ascii[byte as usize], 1),
            _ => self.beyond_ascii(text, at),
        }
    }

    fn beyond_ascii(&self, text: &[u8], at: usize) -> (u8, usize) {
        let first = u32::from(text[at]);
        let next = |offset: usize| u32::from(text[at + offset] & 0x3f);
        match first {
            0..0xe0 => (self.of((first & 0x1f) << 6 | next(1)), 2),
            0xe0..0xf0 => (self.of((first & 0x0f) << 12 | next(1) << 6 | next(2)), 3),
            _ => (self.of((first & 0x07) << 18 | next(1) << 12 | next(2) << 6 | next(3)), 4),
        }
    }
}

/// The ranges of code points in a character class, in order.
fn ranges(class: &str) -> Vec<(usize, usize)> {
    let parsed = regex_syntax::parse(class).map(|parsed| parsed.into_kind());
    let Ok(HirKind::Class(Class::Unicode(class))) = parsed else {
        unreachable!("{class} is a Unicode class, and the tables are compiled in");
    };
    class.iter().map(|range| (range.start() as usize, range.end() as usize)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_of_the_classes() {
        let classes = Classes::get();
        for (letter, flags) in [
            ('a', LETTER),
            ('7', NUMBER),
            (' ', SPACE),
            ('\n', SPACE | NEWLINE),
            ('\u{3000}', SPACE),
            ('中', LETTER | HAN),
            ('〇', NUMBER | HAN),
            ('々', LETTER | HAN),
            ('½', NUMBER),
            ('\u{301}', 0),
            ('，', 0),
            ('😀', 0),
            ('𠀀', LETTER | HAN),
        ] {
            assert_eq!(classes.of(letter.into()), flags, "{letter:?}");
            let text = format!("x{letter}");
            assert_eq!(classes.at(text.as_bytes(), 1), (flags, letter.len_utf8()), "{letter:?}");
        }
    }

    #[test]
    fn the_table_is_small() {
        assert!(Classes::get().flags.len() < 400);
    }
}
