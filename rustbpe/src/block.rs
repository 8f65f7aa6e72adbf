//! Finds where pieces begin in 64 bytes of text, all at once: one bit per byte, and no branch per piece.
//!
//! These are the rules of `scan.rs` for ASCII, in terms of a byte and its neighbours. A piece begins at
//!
//! - the first letter of a run, unless the word includes the character before it: a space that is no line end, or a
//!   single mark that does not follow a blank;
//! - the first mark of a run, unless a blank before it belongs to the same piece; line ends after the marks belong to
//!   them;
//! - the first of every group of digits;
//! - the first character of any other space, the one after its last line end, and its last one, if that is no line end.
//!
//! The first byte of the block begins a piece too, so nothing before it matters.

/// The number of bytes in a block.
pub const BLOCK: usize = 64;
#[cfg(any(test, not(target_arch = "x86_64")))]
const LOW: u64 = 0x0101_0101_0101_0101;

/// For each kind of character, one bit per byte of a block; the first byte is the lowest bit. All other bytes are
/// marks.
#[derive(Debug, Default, PartialEq, Eq)]
struct Kinds {
    letter: u64,
    digit: u64,
    /// Includes line ends and blanks.
    space: u64,
    newline: u64,
    blank: u64,
    apostrophe: u64,
    beyond_ascii: u64,
}

/// Where pieces begin, as far as this block can tell, without the first piece. `digits` is the most digits of a piece.
#[inline]
pub fn starts(bytes: &[u8; BLOCK], digits: usize) -> u64 {
    let Kinds { letter, digit, space, newline, blank, apostrophe, beyond_ascii } = Kinds::of(bytes);
    let mark = !(letter | digit | space | beyond_ascii);
    let plain = space & !newline;

    let marks = mark & !(mark << 1) & !(blank << 1);
    // Adding the lowest bit of a run of ones clears the whole run.
    let theirs = newline & !newline.wrapping_add(newline & mark << 1);
    let others = space & !theirs;
    let lines = plain & !(plain << 1) & newline << 1;
    let last_lines = if lines == 0 { 0 } else { lines & !before(plain, newline) };
    let spaces = others & !(others << 1) | plain & !(space >> 1) | last_lines;
    let words = letter & !(letter << 1) & !((plain | marks) << 1);
    let endings = apostrophe & marks & letter >> 1;
    let after_endings = if endings == 0 { 0 } else { after_endings(bytes, endings) };

    // Bytes beyond ASCII and after the block are unknown, and so is how the space before them is split.
    let known = below(beyond_ascii.trailing_zeros());
    let solid = 64 - (known & !space).leading_zeros();
    (marks | spaces | words | after_endings | numbers(digit, digits)) & known & below(solid + 1) & !1
}

/// All bits below this one.
#[inline(always)]
fn below(bit: u32) -> u64 {
    1u64.checked_shl(bit).unwrap_or(0).wrapping_sub(1)
}

/// The bits of those runs in `of` that are followed by a bit of `what`.
#[inline(always)]
fn before(of: u64, what: u64) -> u64 {
    let (mut found, mut way) = (of & what >> 1, of);
    for step in [1, 2, 4, 8, 16, 32] {
        found |= way & found >> step;
        way &= way >> step;
    }
    found
}

/// The first of every `most` digits in each run.
#[inline(always)]
fn numbers(digit: u64, most: usize) -> u64 {
    let mut all = digit & !(digit << 1);
    let inside = (1..=most).fold(digit, |inside, back| inside & digit << back);
    let mut next = all << most & inside;
    while next != 0 {
        all |= next;
        next = next << most & inside;
    }
    all
}

/// The places after `'s` and other English endings, given their apostrophes.
#[cold]
fn after_endings(bytes: &[u8; BLOCK], mut apostrophes: u64) -> u64 {
    let lower = |at: u32| bytes.get(at as usize).map_or(0, |byte| byte | 0x20);
    let mut after = 0;
    while apostrophes != 0 {
        let at = apostrophes.trailing_zeros();
        apostrophes &= apostrophes - 1;
        let end = match (lower(at + 1), lower(at + 2)) {
            (b's' | b'd' | b'm' | b't', _) => at + 2,
            (b'l', b'l') | (b'v' | b'r', b'e') => at + 3,
            _ => continue,
        };
        after |= 1u64.checked_shl(end).unwrap_or(0);
    }
    after
}

impl Kinds {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn of(bytes: &[u8; BLOCK]) -> Self {
        use std::arch::x86_64::*;
        let mut kinds = Self::default();
        for (part, sixteen) in bytes.chunks_exact(16).enumerate() {
            // SAFETY: SSE2 is part of x86_64, and the load needs no alignment and reads the sixteen bytes of this
            // slice.
            unsafe {
                let bits = |lanes| u64::from(_mm_movemask_epi8(lanes) as u16) << (16 * part);
                let loaded = _mm_loadu_si128(sixteen.as_ptr().cast());
                let same = |byte: u8| _mm_cmpeq_epi8(loaded, _mm_set1_epi8(byte as i8));
                // The comparison is signed, so `first` is moved to the lowest signed number.
                let within = |from, first: u8, number: i8| {
                    let moved = _mm_sub_epi8(from, _mm_set1_epi8((first as i8).wrapping_sub(-128)));
                    _mm_cmplt_epi8(moved, _mm_set1_epi8((-128i8).wrapping_add(number)))
                };
                let blank = same(b' ');
                kinds.letter |= bits(within(_mm_or_si128(loaded, _mm_set1_epi8(0x20)), b'a', 26));
                kinds.digit |= bits(within(loaded, b'0', 10));
                kinds.space |= bits(_mm_or_si128(blank, within(loaded, b'\t', 5)));
                kinds.newline |= bits(_mm_or_si128(same(b'\n'), same(b'\r')));
                kinds.blank |= bits(blank);
                kinds.apostrophe |= bits(same(b'\''));
                kinds.beyond_ascii |= bits(loaded);
            }
        }
        kinds
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(bytes: &[u8; BLOCK]) -> Self {
        Self::portable(bytes)
    }

    /// The same without SSE2, eight bytes at a time.
    #[cfg(any(test, not(target_arch = "x86_64")))]
    fn portable(bytes: &[u8; BLOCK]) -> Self {
        let mut kinds = Self::default();
        for (part, eight) in bytes.chunks_exact(8).enumerate() {
            let word = eight.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
            let bits = |high: u64| ((high >> 7 & LOW).wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * part);
            let blank = within(word, b' ', b' ');
            kinds.letter |= bits(within(word | (0x20 * LOW), b'a', b'z'));
            kinds.digit |= bits(within(word, b'0', b'9'));
            kinds.space |= bits(blank | within(word, b'\t', b'\r'));
            kinds.newline |= bits(within(word, b'\n', b'\n') | within(word, b'\r', b'\r'));
            kinds.blank |= bits(blank);
            kinds.apostrophe |= bits(within(word, b'\'', b'\''));
            kinds.beyond_ascii |= bits(word);
        }
        kinds
    }
}

/// The highest bit of every byte from `first` to `last`, both ASCII: eight comparisons with a few additions.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn within(word: u64, first: u8, last: u8) -> u64 {
    let ascii = word & (0x7f * LOW);
    let from_first = ascii + u64::from(0x80 - first) * LOW;
    let past_last = ascii + u64::from(0x7f - last) * LOW;
    from_first & !past_last & !word & (0x80 * LOW)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    #[test]
    fn kinds_are_the_same_on_every_processor() {
        let mut random = Random::new(1);
        for _ in 0..2_000 {
            let bytes = std::array::from_fn(|_| random.below(256) as u8);
            assert_eq!(Kinds::of(&bytes), Kinds::portable(&bytes), "{bytes:?}");
        }
    }

    #[test]
    fn kinds_are_those_of_each_byte() {
        for byte in 0..=255u8 {
            let kinds = Kinds::of(&[byte; BLOCK]);
            let all = |is: bool| if is { u64::MAX } else { 0 };
            assert_eq!(kinds.letter, all(byte.is_ascii_alphabetic()), "{byte}");
            assert_eq!(kinds.digit, all(byte.is_ascii_digit()), "{byte}");
            assert_eq!(kinds.space, all(matches!(byte, b' ' | b'\t'..=b'\r')), "{byte}");
            assert_eq!(kinds.newline, all(matches!(byte, b'\n' | b'\r')), "{byte}");
            assert_eq!((kinds.blank, kinds.apostrophe), (all(byte == b' '), all(byte == b'\'')), "{byte}");
            assert_eq!(kinds.beyond_ascii, all(byte >= 0x80), "{byte}");
        }
    }

    #[test]
    fn pieces_begin_where_the_rules_say() {
        let text = "I've 12345  (x) ((y\n\n  z!\n \t.'ll''s\t-a \n b......................";
        let mut found: Vec<&str> = Vec::new();
        let (mut ends, mut start) = (starts(text.as_bytes().try_into().unwrap(), 3), 0);
        while ends != 0 {
            let end = ends.trailing_zeros() as usize;
            found.push(&text[start..end]);
            (start, ends) = (end, ends & (ends - 1));
        }
        assert_eq!(
            found,
            [
                "I", "'ve", " ", "123", "45", " ", " (", "x", ")", " ((", "y", "\n\n", " ", " z", "!\n", " ", "\t",
                ".'", "ll", "''", "s", "\t", "-a", " \n", " b"
            ]
        );
    }
}
