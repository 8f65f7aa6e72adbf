//! Tells where merges may cross a place in a text. At most places, none does: the text may be cut there, and the tokens
//! on both sides need not be followed back in time.

/// A Bloom filter: a set that may seem to have a number that was never added, but never misses one that was.
pub struct Filter(Vec<u64>);

impl Filter {
    pub fn new(bits: usize) -> Self {
        Self(vec![0; bits.div_ceil(64).next_power_of_two()])
    }

    /// The word for a hash, and the two bits in it. All bits of the hash must be good.
    #[inline]
    fn place(&self, hash: u64) -> (usize, u64) {
        ((hash >> 44) as usize & (self.0.len() - 1), 1 << (hash >> 32 & 63) | 1 << (hash >> 38 & 63))
    }

    pub fn add(&mut self, hash: u64) {
        let (word, bits) = self.place(hash);
        self.0[word] |= bits;
    }

    #[inline]
    pub fn may_have(&self, hash: u64) -> bool {
        let (word, bits) = self.place(hash);
        self.0[word] & bits == bits
    }
}

/// How many bytes on each side of a border are compared: as many as a Han letter has.
const SIDE: usize = 3;
const LONG_BITS: usize = 1 << 19;
/// The lowest first byte of a character with three or more bytes.
const LETTER: u8 = 0xe0;
/// How many places of a piece are checked together: one bit per place in a word.
const WINDOW: usize = 64;

/// The bytes around the border of every pair that is merged.
pub struct Borders {
    /// Pairs in which a side is short, with fewer than [`SIDE`] bytes: the left token's last byte and the right token's
    /// first byte.
    short: BytePairs,
    /// The same bytes of the pairs in which both sides are short.
    both_short: BytePairs,
    /// The bytes around the borders of all other pairs: [`SIDE`] bytes of a long side, and one byte of a short side.
    around: Filter,
}

impl Borders {
    /// The borders of these tokens: the bytes of a token, and how many of them belong to the left token of its pair.
    pub fn new<'t>(tokens: impl Iterator<Item = (&'t [u8], usize)>) -> Self {
        let mut borders =
            Self { short: BytePairs::new(), both_short: BytePairs::new(), around: Filter::new(LONG_BITS) };
        for (both, at) in tokens {
            let short = (at < SIDE, both.len() - at < SIDE);
            if short.0 || short.1 {
                borders.short.add(both[at - 1], both[at]);
            }
            match short {
                (true, true) => borders.both_short.add(both[at - 1], both[at]),
                (true, false) => borders.around.add(hash(&both[at - 1..at + SIDE])),
                (false, true) => borders.around.add(hash(&both[at - SIDE..=at])),
                (false, false) => borders.around.add(hash(&both[at - SIDE..at + SIDE])),
            }
        }
        borders
    }

    /// Whether some merge may cross this place of a text, judging by the bytes beside it.
    #[inline]
    pub fn may_be_crossed(&self, text: &[u8], at: usize) -> bool {
        self.short.has(text[at - 1], text[at]) && self.may_be_crossed_shortly(text, at)
            || at >= SIDE && at + SIDE <= text.len() && self.around.may_have(hash(&text[at - SIDE..at + SIDE]))
    }

    /// The same, for merges with a short side.
    fn may_be_crossed_shortly(&self, text: &[u8], at: usize) -> bool {
        self.both_short.has(text[at - 1], text[at])
            || at + SIDE <= text.len() && self.around.may_have(hash(&text[at - 1..at + SIDE]))
            || at >= SIDE && self.around.may_have(hash(&text[at - SIDE..=at]))
    }

    /// Cut a piece before every character of three or more bytes that no merge can reach across, and call `take` with
    /// the end of each part.
    #[inline]
    pub fn cut(&self, piece: &[u8], mut take: impl FnMut(usize)) {
        let mut at = 1;
        while at < piece.len() {
            // First collect all answers as bits, then use them: no branch has to be predicted for each letter.
            let (first, mut cuts) = (at, 0u64);
            while at < piece.len().min(first + WINDOW) {
                if piece[at] < LETTER {
                    at += 1;
                } else {
                    cuts |= u64::from(!self.may_be_crossed(piece, at)) << (at - first);
                    at += SIDE;
                }
            }
            while cuts != 0 {
                take(first + cuts.trailing_zeros() as usize);
                cuts &= cuts - 1;
            }
        }
        take(piece.len());
    }
}

/// A set of pairs of bytes, as one bit for each pair.
struct BytePairs(Vec<u64>);

impl BytePairs {
    fn new() -> Self {
        Self(vec![0; (1 << 16) / 64])
    }

    #[inline]
    fn place(left: u8, right: u8) -> (usize, u64) {
        (usize::from(left) << 2 | usize::from(right >> 6), 1 << (right & 63))
    }

    fn add(&mut self, left: u8, right: u8) {
        let (word, bit) = Self::place(left, right);
        self.0[word] |= bit;
    }

    #[inline]
    fn has(&self, left: u8, right: u8) -> bool {
        let (word, bit) = Self::place(left, right);
        self.0[word] & bit != 0
    }
}

/// A hash of up to eight bytes. Only its high half is good.
#[inline(always)]
fn hash(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    (u64::from_le_bytes(word) ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn borders(pairs: &[&str]) -> Borders {
        let tokens: Vec<(String, usize)> =
            pairs.iter().map(|pair| (pair.replace('|', ""), pair.find('|').unwrap())).collect();
        Borders::new(tokens.iter().map(|(both, at)| (both.as_bytes(), *at)))
    }

    #[test]
    fn all_borders_of_pairs_are_known_and_few_others() {
        let borders = borders(&["今天|天气", "说|话", "a|bcd", "defg|h", "i|j", "xyz|xyz", "abcdef|ghi"]);
        let known = |text: &str| {
            let at = text.find('|').unwrap();
            borders.may_be_crossed(text.replace('|', "").as_bytes(), at)
        };
        let pairs = ["明天|天空", "说|话", "xxa|bcd", "efg|hxx", "xi|jx", "wxyz|xyzw", "def|ghij"];
        assert!(pairs.iter().all(|text| known(text)));
        let others = ["明天|气天", "话|说", "xxa|bxx", "exg|hxx", "j|i", "wyz|xyzw", "abc|def", "def|gh", "z|xyz"];
        assert!(!others.iter().any(|text| known(text)));
    }

    #[test]
    fn pieces_are_cut_where_no_pair_crosses() {
        let borders = borders(&["今天|天气", "字|汉", "a|汉"]);
        let parts = |text: &str| {
            let (mut parts, mut from) = (Vec::new(), 0);
            borders.cut(text.as_bytes(), |end| {
                parts.push(text[from..end].to_string());
                from = end;
            });
            parts
        };
        assert_eq!(parts("今天天气汉字汉"), ["今", "天天", "气", "汉", "字汉"]);
        assert_eq!(parts("a汉é字😀字"), ["a汉é", "字", "😀", "字"]);
        for piece in ["a", "é", "汉", "abcdefgh"] {
            assert_eq!(parts(piece), [piece]);
        }
        assert_eq!(parts(&"说".repeat(1000)), vec!["说"; 1000]);
        assert_eq!(parts(&"字汉".repeat(1000)), vec!["字汉"; 1000]);
        assert_eq!(parts(&"é".repeat(1000)), ["é".repeat(1000)]);
    }

    #[test]
    fn a_filter_has_what_was_added_and_little_else() {
        let mut filter = Filter::new(1 << 12);
        let hash = |number: u64| (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..200).for_each(|number| filter.add(hash(number)));
        assert!((0..200).all(|number| filter.may_have(hash(number))));
        assert!((200..10_000).filter(|&number| filter.may_have(hash(number))).count() < 500);
    }
}
