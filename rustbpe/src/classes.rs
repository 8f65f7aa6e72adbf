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
        let mut all = vec![0u8; BLOCK * BLOCKS];
        for (class, flag) in
            [(r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE), (r"[\r\n]", NEWLINE), (r"\p{Han}", HAN)]
        {
            for (first, last) in ranges(class) {
                all[first as usize..=last as usize].iter_mut().for_each(|flags| *flags |= flag);
            }
        }
        let mut table = Self { ascii: [0; BLOCK], blocks: Vec::with_capacity(BLOCKS), flags: Vec::new() };
        for block in all.chunks_exact(BLOCK) {
            let known = table.flags.iter().position(|known| known == block);
            let number = known.unwrap_or_else(|| {
                let mut flags = [0; BLOCK];
                flags.copy_from_slice(block);
                table.flags.push(flags);
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

/// The ranges of code points in a character class.
fn ranges(class: &str) -> Vec<(u32, u32)> {
    let parsed = regex_syntax::parse(class).map(|parsed| parsed.into_kind());
    let Ok(HirKind::Class(Class::Unicode(class))) = parsed else {
        unreachable!("{class} is a Unicode class, and the tables are compiled in");
    };
    class.iter().map(|range| (u32::from(range.start()), u32::from(range.end()))).collect()
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
