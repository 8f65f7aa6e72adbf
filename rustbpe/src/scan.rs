//! The split patterns of the GPT-4 family, written out by hand: the same pieces as the regular expression engine, 25
//! times as fast. The alternatives of the pattern, in order:
//!
//! ```text
//! '(?i:[sdmt]|ll|ve|re)          an English ending
//! [^\r\n\p{L}\p{N}]?+\p{L}+      a word, with one mark or space before it
//! \p{N}{1,DIGITS}                a few digits
//!  ?[^\s\p{L}\p{N}]++[\r\n]*     marks, with a space before them and line ends after them
//! \s*[\r\n]                      space, up to its last line end
//! \s+(?!\S)                      space without its last character, which belongs to what follows
//! \s+                            space
//! ```
//!
//! If Han letters are split from others, `\p{Han}+` or `\p{Han}{1,N}` comes second, and words consist of other letters.

use crate::block::{starts, BLOCK};
use crate::classes::{Classes, HAN, LETTER, NEWLINE, NUMBER, SPACE};

/// One pattern of the family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scanner {
    /// The most digits in a piece.
    digits: usize,
    /// The most Han letters in a piece of Han letters. None if they are treated like other letters.
    han: Option<usize>,
}

impl Scanner {
    /// The scanner for this pattern, if there is one.
    pub fn for_pattern(pattern: &str) -> Option<Self> {
        let digits = [1, 2, 3].into_iter();
        let family = digits.flat_map(|digits| {
            let han = [None, Some(usize::MAX), Some(1), Some(2), Some(3), Some(4), Some(6), Some(8)];
            han.map(|han| Self { digits, han })
        });
        let found = family.into_iter().find(|scanner| scanner.pattern() == pattern)?;
        Classes::get(); // made now, so that the first text does not wait for it
        Some(found)
    }

    /// The regular expression that gives the same pieces as this scanner.
    pub fn pattern(&self) -> String {
        let (han, letter) = match self.han {
            None => (String::new(), r"\p{L}"),
            Some(usize::MAX) => (r"|\p{Han}+".into(), r"(?:(?!\p{Han})\p{L})"),
            Some(most) => (format!(r"|\p{{Han}}{{1,{most}}}"), r"(?:(?!\p{Han})\p{L})"),
        };
        let digits = self.digits;
        let words = format!(r"'(?i:[sdmt]|ll|ve|re){han}|[^\r\n\p{{L}}\p{{N}}]?+{letter}+|\p{{N}}{{1,{digits}}}");
        words + r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    }

    /// The first place from `from` on where the text can be cut without changing its pieces: after a letter and before a
    /// character that is neither a letter nor Han, since no piece goes on there. None if there is no such place.
    pub fn cut(text: &str, from: usize) -> Option<usize> {
        let classes = Classes::get();
        let mut after_letter = false;
        let mut at = (from..text.len()).find(|&at| text.is_char_boundary(at))?;
        while at < text.len() {
            let (class, length) = classes.at(text.as_bytes(), at);
            if after_letter && class & (LETTER | HAN) == 0 {
                return Some(at);
            }
            after_letter = class & LETTER != 0;
            at += length;
        }
        None
    }

    /// Call `take` with the start and the end of every piece, in bytes. The pieces together are the whole text.
    #[inline]
    pub fn split(&self, text: &str, mut take: impl FnMut(usize, usize)) {
        let scan = Scan { text: text.as_bytes(), classes: Classes::get(), scanner: *self };
        let mut start = 0;
        while start < text.len() {
            let (first, mut ends) = match scan.block(start) {
                0 => (scan.piece(start), 1),
                ends => (start, ends),
            };
            while ends != 0 {
                let end = first + ends.trailing_zeros() as usize;
                take(start, end);
                start = end;
                ends &= ends - 1;
            }
        }
    }
}

/// A text that is being split.
struct Scan<'t> {
    text: &'t [u8],
    classes: &'static Classes,
    scanner: Scanner,
}

impl Scan<'_> {
    /// Where pieces end in the block at `start`, as bits. No bits if `piece` is the better way here.
    #[inline]
    fn block(&self, start: usize) -> u64 {
        match self.text.get(start..start + BLOCK).and_then(|bytes| bytes.try_into().ok()) {
            // Text beyond ASCII is often followed by more of it.
            Some(bytes) if load(self.text, start).is_some_and(|word| word & 0x8080_8080_8080_8080 == 0) => {
                starts(bytes, self.scanner.digits)
            }
            _ => 0,
        }
    }

    /// Where the piece that begins at `start` ends.
    #[inline]
    fn piece(&self, start: usize) -> usize {
        let lead = LEADS[self.text[start] as usize];
        if lead != Lead::Rare {
            if let Some(word) = load(self.text, start) {
                // The first byte is a letter, or may precede letters: how far do the ASCII letters after it reach?
                let length = first(not_letters(word) & !0xff);
                if length > 1 || lead == Lead::Letter {
                    let end = start + length;
                    // The word may continue after the loaded bytes, or with a letter beyond ASCII.
                    let goes_on = length == 8 || self.text[end] >= 0x80;
                    return if goes_on { self.letters(end) } else { end };
                }
            }
        }
        self.any_piece(start)
    }

    /// The same for any first character: tries the alternatives of the pattern in order.
    fn any_piece(&self, start: usize) -> usize {
        let (class, length) = self.class(start);
        let next = start + length;
        if self.text[start] == b'\'' {
            if let Some(end) = self.ending(next) {
                return end;
            }
        }
        if let Some(most) = self.scanner.han {
            if class & HAN != 0 {
                return self.run(next, most - 1, |class| class & HAN != 0);
            }
        }
        if class & LETTER != 0 {
            return self.letters(next);
        }
        let (after, after_length) = if next < self.text.len() { self.class(next) } else { (SPACE, 0) };
        if class & (NEWLINE | NUMBER) == 0 && self.is_word(after) {
            return self.letters(next + after_length);
        }
        if class & NUMBER != 0 {
            return self.run(next, self.scanner.digits - 1, |class| class & NUMBER != 0);
        }
        if class & SPACE == 0 {
            return self.marks(next);
        }
        if self.text[start] == b' ' && after & (SPACE | LETTER | NUMBER) == 0 {
            return self.marks(next + after_length);
        }
        self.space(start)
    }

    #[inline]
    fn class(&self, at: usize) -> (u8, usize) {
        self.classes.at(self.text, at)
    }

    /// Whether a character of this class can be in a word.
    fn is_word(&self, class: u8) -> bool {
        class & LETTER != 0 && (self.scanner.han.is_none() || class & HAN == 0)
    }

    /// The end of a run of at most `most` characters of one kind.
    fn run(&self, mut at: usize, most: usize, kind: impl Fn(u8) -> bool) -> usize {
        for _ in 0..most {
            if at == self.text.len() {
                break;
            }
            let (class, length) = self.class(at);
            if !kind(class) {
                break;
            }
            at += length;
        }
        at
    }

    /// The end of a run of letters that can be in words.
    fn letters(&self, mut at: usize) -> usize {
        let text = self.text;
        let mixed = self.scanner.han.is_none();
        while at < text.len() {
            match text[at] {
                b'a'..=b'z' | b'A'..=b'Z' => match load(text, at) {
                    Some(word) => at += first(not_letters(word)),
                    None => at += 1,
                },
                0..0x80 => return at,
                // U+5000 to U+9FFF are all letters, and all Han.
                0xe5..=0xe9 if mixed => at += 3,
                _ => {
                    let (class, length) = self.class(at);
                    if !self.is_word(class) {
                        return at;
                    }
                    at += length;
                }
            }
        }
        at
    }

    /// The end of `'s` or another English ending; `at` is the place after the apostrophe.
    fn ending(&self, at: usize) -> Option<usize> {
        let lower = |offset: usize| self.text.get(at + offset).map(|byte| byte | 0x20);
        match (lower(0)?, lower(1)) {
            // U+017F, the long s, is an s if case is ignored. (0xe5 is 0xc5 | 0x20.)
            (0xe5, _) if self.text[at..].starts_with("\u{17f}".as_bytes()) => Some(at + 2),
            (b's' | b'd' | b'm' | b't', _) => Some(at + 1),
            (b'l', Some(b'l')) | (b'v' | b'r', Some(b'e')) => Some(at + 2),
            _ => None,
        }
    }

    /// The end of a run of marks, with the line ends after it.
    fn marks(&self, at: usize) -> usize {
        let marks = self.run(at, usize::MAX, |class| class & (SPACE | LETTER | NUMBER) == 0);
        self.run(marks, usize::MAX, |class| class & NEWLINE != 0)
    }

    /// The end of a piece that is only space.
    fn space(&self, start: usize) -> usize {
        let (mut at, mut last, mut after_newline) = (start, start, None);
        while at < self.text.len() {
            let (class, length) = self.class(at);
            if class & SPACE == 0 {
                break;
            }
            last = at;
            at += length;
            if class & NEWLINE != 0 {
                after_newline = Some(at);
            }
        }
        match after_newline {
            Some(end) => end,
            None if at == self.text.len() || last == start => at,
            None => last,
        }
    }
}

/// What the fast path can do with the first byte of a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lead {
    Letter,
    /// A mark or a space, which belongs to letters that follow it.
    Before,
    Rare,
}

static LEADS: [Lead; 256] = {
    let mut leads = [Lead::Rare; 256];
    let mut byte = 0;
    while byte < 128 {
        leads[byte] = match byte as u8 {
            b'a'..=b'z' | b'A'..=b'Z' => Lead::Letter,
            b'0'..=b'9' | b'\r' | b'\n' | b'\'' => Lead::Rare,
            _ => Lead::Before,
        };
        byte += 1;
    }
    leads
};

/// Eight bytes, the first in the lowest place. None near the end of the text.
#[inline]
fn load(text: &[u8], at: usize) -> Option<u64> {
    let bytes = text.get(at..at + 8)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// The highest bit of every byte that is not an ASCII letter: eight comparisons with a few additions.
#[inline]
fn not_letters(word: u64) -> u64 {
    const ALL: u64 = 0x0101_0101_0101_0101;
    let lower = (word | (0x20 * ALL)) & (0x7f * ALL);
    let from_a = lower + (0x80 - 0x61) * ALL; // the highest bit is set from 'a' on
    let past_z = lower + (0x80 - 0x7b) * ALL; // the highest bit is set after 'z'
    (!from_a | past_z | word) & (0x80 * ALL)
}

/// The index of the first byte whose highest bit is set. 8 if there is none.
#[inline]
fn first(high_bits: u64) -> usize {
    high_bits.trailing_zeros() as usize / 8
}
