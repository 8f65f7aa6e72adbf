//! Splits a text into pieces. Merges never cross the border of a piece.

use fancy_regex::{Regex, RegexBuilder};

use crate::scan::Scanner;
use crate::Error;

/// GPT-4's split pattern, the default of training.
pub const GPT4_PATTERN: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
);

/// How often the engine may backtrack in one piece: enough for any sensible pattern, and for a hopeless pattern an
/// error after seconds instead of years.
const BACKTRACK_LIMIT: usize = 100_000_000;
const EXCERPT_CHARACTERS: usize = 20;

/// A compiled split pattern. Give each thread its own clone, because each clone has its own working memory.
#[derive(Debug, Clone)]
pub struct Splitter {
    pattern: String,
    way: Way,
}

#[derive(Debug, Clone)]
enum Way {
    /// A pattern that is written out in `scan.rs`.
    Scan(Scanner),
    /// Any other pattern, for the regular expression engine.
    Search(Box<Regex>),
}

impl Splitter {
    /// Compile `pattern`, which may use any syntax of the fancy-regex crate.
    pub fn new(pattern: &str) -> Result<Self, Error> {
        match Scanner::for_pattern(pattern) {
            Some(scanner) => Ok(Self { pattern: pattern.to_string(), way: Way::Scan(scanner) }),
            None => Self::searching(pattern, BACKTRACK_LIMIT),
        }
    }

    /// Compile a pattern for the engine, even if there is a scanner for it.
    fn searching(pattern: &str, backtrack_limit: usize) -> Result<Self, Error> {
        match RegexBuilder::new(pattern).backtrack_limit(backtrack_limit).build() {
            Ok(regex) => Ok(Self { pattern: pattern.to_string(), way: Way::Search(Box::new(regex)) }),
            Err(error) => Err(Error::Pattern { message: error.to_string() }),
        }
    }

    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// Split a text into parts of about `bytes` bytes that together have the pieces of the whole text. Patterns for the
    /// engine say nothing about where that is possible, so the whole text is one part.
    pub fn parts<'t>(&self, text: &'t str, bytes: usize) -> impl Iterator<Item = &'t str> {
        let scanned = matches!(self.way, Way::Scan(_));
        let mut rest = text;
        std::iter::from_fn(move || {
            let cut = if scanned { Scanner::cut(rest, bytes) } else { None };
            let (part, after) = rest.split_at(cut.unwrap_or(rest.len()));
            rest = after;
            (!part.is_empty()).then_some(part)
        })
    }

    /// Call `take` with the start and the end of every piece of `text`, in order. It is an error if the pieces are not
    /// the whole text.
    #[inline]
    pub fn split(&self, text: &str, take: impl FnMut(usize, usize)) -> Result<(), Error> {
        match &self.way {
            Way::Scan(scanner) => {
                scanner.split(text, take);
                Ok(())
            }
            Way::Search(regex) => search(regex, text, take),
        }
    }
}

fn search(regex: &Regex, text: &str, mut take: impl FnMut(usize, usize)) -> Result<(), Error> {
    let mut covered = 0;
    for found in regex.find_iter(text) {
        let found = found.map_err(|error| Error::Matching {
            character: text[..covered].chars().count(),
            message: error.to_string(),
        })?;
        if found.start() != covered {
            return Err(not_covered(text, covered));
        }
        if found.end() > covered {
            take(covered, found.end());
            covered = found.end();
        }
    }
    if covered == text.len() {
        Ok(())
    } else {
        Err(not_covered(text, covered))
    }
}

fn not_covered(text: &str, byte: usize) -> Error {
    let (before, after) = text.split_at(byte);
    Error::NotCovered { character: before.chars().count(), excerpt: after.chars().take(EXCERPT_CHARACTERS).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    fn pieces(pattern: &str, text: &str) -> Result<Vec<String>, Error> {
        let mut all = Vec::new();
        Splitter::new(pattern)?.split(text, |start, end| all.push(text[start..end].to_string()))?;
        Ok(all)
    }

    #[test]
    fn gpt4_pattern_keeps_words_numbers_and_spaces_apart() {
        let found = pieces(GPT4_PATTERN, "I've 12345  apples,\n今天，好 'S").unwrap();
        assert_eq!(found, ["I", "'ve", " ", "123", "45", " ", " apples", ",\n", "今天", "，好", " '", "S"]);
    }

    #[test]
    fn text_between_matches_is_an_error_with_its_place() {
        let error = pieces(r"\w+", "汉字 and").unwrap_err();
        assert_eq!(error, Error::NotCovered { character: 2, excerpt: " and".into() });
    }

    #[test]
    fn text_after_the_last_match_is_an_error() {
        assert_eq!(pieces(r"\w+", "ab!"), Err(Error::NotCovered { character: 2, excerpt: "!".into() }));
        assert_eq!(pieces("", "x"), Err(Error::NotCovered { character: 0, excerpt: "x".into() }));
        assert_eq!(pieces("(?!)", "x"), Err(Error::NotCovered { character: 0, excerpt: "x".into() }));
    }

    #[test]
    fn empty_matches_make_no_pieces() {
        assert_eq!(pieces(r"b|a*", "aab").unwrap(), ["aa", "b"]);
        assert_eq!(pieces(r"a*|b", "aab"), Err(Error::NotCovered { character: 2, excerpt: "b".into() }));
        assert!(pieces(GPT4_PATTERN, "").unwrap().is_empty());
    }

    #[test]
    fn parts_have_the_pieces_of_the_whole_text() {
        let letters: Vec<char> = "aé汉〇々1 \n\t\r'.，\u{301}\u{3000}sl".chars().collect();
        for pattern in patterns() {
            let splitter = Splitter::new(&pattern).unwrap();
            for seed in 0..30 {
                let mut random = Random::new(seed);
                let text: String = (0..200).map(|_| letters[random.below(letters.len())]).collect();
                for bytes in [1, 7, 60] {
                    let parts: Vec<&str> = splitter.parts(&text, bytes).collect();
                    assert_eq!(parts.concat(), text);
                    assert!(bytes > 1 || parts.len() > 5);
                    let found = parts.iter().flat_map(|part| pieces(&pattern, part).unwrap());
                    assert_eq!(found.collect::<Vec<_>>(), pieces(&pattern, &text).unwrap(), "{text:?} by {pattern}");
                }
            }
        }
        assert_eq!(Splitter::new(r"(?s).").unwrap().parts("a b c", 1).count(), 1);
    }

    #[test]
    fn a_broken_pattern_is_an_error() {
        assert!(matches!(Splitter::new("(unclosed"), Err(Error::Pattern { .. })));
    }

    #[test]
    fn a_hopeless_pattern_is_an_error_not_a_loss() {
        let splitter = Splitter::searching(r"(?:a|a|aa)+(?!.)|(?s:.)", 100_000).unwrap();
        let failed = splitter.split(&("a".repeat(60) + "b"), |_, _| {});
        assert!(matches!(failed, Err(Error::Matching { character: 0, .. })), "{failed:?}");
    }

    #[test]
    fn a_run_of_spaces_too_long_for_the_engine_is_an_error_not_a_loss() {
        let text = " ".repeat(2_000_000) + "x";
        let engine = Splitter::searching(GPT4_PATTERN, BACKTRACK_LIMIT).unwrap();
        assert!(matches!(engine.split(&text, |_, _| {}), Err(Error::Matching { character: 0, .. })));
        assert_eq!(pieces(GPT4_PATTERN, &text).unwrap().len(), 2);
    }

    fn patterns() -> impl Iterator<Item = String> {
        let apart = |han: &str, digits: usize| {
            GPT4_PATTERN
                .replace(r"|[^\r", &format!(r"|{han}|[^\r"))
                .replace(r"\p{L}+|", r"(?:(?!\p{Han})\p{L})+|")
                .replace("{1,3}", &format!("{{1,{digits}}}"))
        };
        let han = [r"\p{Han}+", r"\p{Han}{1,1}", r"\p{Han}{1,4}"];
        let apart = han.into_iter().zip([2, 3, 1]).map(move |(han, digits)| apart(han, digits));
        [2, 3].map(|digits| GPT4_PATTERN.replace("{1,3}", &format!("{{1,{digits}}}"))).into_iter().chain(apart)
    }

    /// Fails where the scanner and the engine split a text differently.
    fn assert_same(text: &str, scanner: &Splitter, engine: &Splitter) {
        let ends = |splitter: &Splitter| {
            let mut ends = Vec::new();
            splitter.split(text, |_, end| ends.push(end)).unwrap();
            ends
        };
        assert_eq!(ends(scanner), ends(engine), "{text:?} by {}", scanner.pattern());
    }

    fn both(pattern: &str) -> (Splitter, Splitter) {
        let scanner = Splitter::new(pattern).unwrap();
        assert!(matches!(scanner.way, Way::Scan(_)), "{pattern}");
        (scanner, Splitter::searching(pattern, BACKTRACK_LIMIT).unwrap())
    }

    #[test]
    fn scanners_split_like_the_engine_on_random_texts() {
        let parts = [
            "a",
            "Zq",
            "word",
            "longerword",
            "'",
            "'s",
            "'LL",
            "'ve",
            "'R",
            "'\u{17f}",
            "K",
            "1",
            "42",
            "½",
            "〇",
            " ",
            "  ",
            "\t",
            "\n",
            "\r\n",
            "\u{85}",
            "\u{3000}",
            "\u{a0}",
            "!",
            "?!",
            "_",
            "(",
            "，",
            "。",
            "中",
            "汉字",
            "々",
            "⼀",
            "é",
            "e\u{301}",
            "ß",
            "я",
            "한",
            "あ",
            "😀",
            "\u{200d}",
            "\0",
            "\u{7f}",
            "龯",
            "鿿",
            "䷀",
            "𠀀",
            "\u{e000}",
        ];
        for (number, pattern) in patterns().enumerate() {
            let (scanner, engine) = both(&pattern);
            let mut random = Random::new(number as u64);
            for _ in 0..8_000 {
                let most = [12, 60][random.below(2)];
                let length = 1 + random.below(most);
                let text: String = (0..length).map(|_| parts[random.below(parts.len())]).collect();
                assert_same(&text, &scanner, &engine);
            }
        }
    }

    #[test]
    fn scanners_split_like_the_engine_around_every_character() {
        for pattern in patterns() {
            let (scanner, engine) = both(&pattern);
            for block in (0..0x11_0000).step_by(64) {
                let mut text = String::new();
                for letter in (block..block + 64).filter_map(char::from_u32) {
                    for around in ["x", " ", "!\n", "7", "中", "'"] {
                        text.extend([letter.to_string().as_str(), around, letter.to_string().as_str()]);
                    }
                }
                assert_same(&text, &scanner, &engine);
            }
        }
    }
}
