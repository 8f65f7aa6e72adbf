//! Cutting a text into the pieces that merges never cross.

use fancy_regex::{Regex, RegexBuilder};

use crate::Error;

/// GPT-4's split pattern, the default of training.
pub const GPT4_PATTERN: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
);

/// Steps back that one piece may cost: enough for any honest pattern, and seconds, not years, for a hopeless one.
const BACKTRACK_LIMIT: usize = 100_000_000;
const EXCERPT_CHARACTERS: usize = 20;

/// A compiled split pattern. Give each thread a clone: the engine's working memory is per clone.
#[derive(Debug, Clone)]
pub struct Splitter {
    regex: Regex,
}

impl Splitter {
    /// Compile `pattern`; any syntax of the fancy-regex crate is allowed.
    pub fn new(pattern: &str) -> Result<Self, Error> {
        Self::with_limit(pattern, BACKTRACK_LIMIT)
    }

    fn with_limit(pattern: &str, backtrack_limit: usize) -> Result<Self, Error> {
        match RegexBuilder::new(pattern).backtrack_limit(backtrack_limit).build() {
            Ok(regex) => Ok(Self { regex }),
            Err(error) => Err(Error::Pattern { message: error.to_string() }),
        }
    }

    pub fn pattern(&self) -> &str {
        self.regex.as_str()
    }

    /// Hand every piece of `text` to `take`, in order; together they are the whole text, or it is an error.
    pub fn split<'t>(&self, text: &'t str, mut take: impl FnMut(&'t str)) -> Result<(), Error> {
        let mut covered = 0;
        for found in self.regex.find_iter(text) {
            let found = found.map_err(|error| Error::Matching {
                character: text[..covered].chars().count(),
                message: error.to_string(),
            })?;
            if found.start() != covered {
                return Err(not_covered(text, covered));
            }
            if found.end() > covered {
                take(&text[covered..found.end()]);
                covered = found.end();
            }
        }
        if covered == text.len() {
            Ok(())
        } else {
            Err(not_covered(text, covered))
        }
    }
}

fn not_covered(text: &str, byte: usize) -> Error {
    let (before, after) = text.split_at(byte);
    Error::NotCovered { character: before.chars().count(), excerpt: after.chars().take(EXCERPT_CHARACTERS).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(pattern: &str, text: &str) -> Result<Vec<String>, Error> {
        let mut all = Vec::new();
        Splitter::new(pattern)?.split(text, |piece| all.push(piece.to_string()))?;
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
    fn a_broken_pattern_is_an_error() {
        assert!(matches!(Splitter::new("(unclosed"), Err(Error::Pattern { .. })));
    }

    #[test]
    fn a_hopeless_pattern_is_an_error_not_a_loss() {
        let splitter = Splitter::with_limit(r"(?:a|a|aa)+(?!.)|(?s:.)", 100_000).unwrap();
        let failed = splitter.split(&("a".repeat(60) + "b"), |_| {});
        assert!(matches!(failed, Err(Error::Matching { character: 0, .. })), "{failed:?}");
    }

    #[test]
    fn a_run_of_spaces_too_long_for_the_engine_is_an_error_not_a_loss() {
        let text = " ".repeat(2_000_000) + "x";
        assert!(matches!(pieces(GPT4_PATTERN, &text), Err(Error::Matching { character: 0, .. })));
    }
}
