//! Everything that can go wrong in the core, with words for the user.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Fewer than 256 tokens cannot hold the byte values; more than the trainer's symbols cannot be told apart.
    VocabSize { given: u64 },
    /// The split pattern does not compile.
    Pattern { message: String },
    /// The split pattern found no piece at this character, so that text would be lost.
    NotCovered { character: usize, excerpt: String },
    /// The regular expression engine gave up (too much backtracking) in a piece that starts at this character.
    Matching { character: usize, message: String },
    /// The distinct pieces have more bytes than positions fit into 32 bits.
    TooMuchText { bytes: u64 },
    /// The bytes of all tokens are too many to number.
    TooLongTokens { bytes: usize, most: usize },
    /// A merge names a token that does not exist yet.
    BadMerge { token: u32 },
    /// The first 256 tokens must be the byte values in their order.
    NotAByte { token: u32 },
    /// A token must be made of two earlier ones by merging its bytes.
    NotAMerge { token: u32, parts: usize },
    /// An id outside the vocabulary.
    UnknownId { index: usize, id: u32, vocab_size: u32 },
    /// Encoding needs the split pattern that training sets.
    Untrained,
    /// The caller asked to stop.
    Stopped,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::VocabSize { given } => write!(
                f,
                "vocab_size must be from {} (one token per byte value) to {}, got {given}",
                crate::BYTES,
                crate::MAX_VOCAB_SIZE
            ),
            Error::Pattern { message } => write!(f, "pattern is not a valid regular expression: {message}"),
            Error::NotCovered { character, excerpt } => write!(
                f,
                "pattern does not cover the text: it matches nothing at character {character} ({excerpt:?}), and no \
                 text may be dropped; add an alternative that takes every other character, such as |\\s+|\\S"
            ),
            Error::Matching { character, message } => {
                write!(f, "pattern could not be matched from character {character} on: {message}")
            }
            Error::TooMuchText { bytes } => write!(
                f,
                "the distinct pieces of the text have {bytes} bytes, and the trainer holds {}; train on a sample, or \
                 with a pattern that makes shorter pieces",
                u32::MAX
            ),
            Error::TooLongTokens { bytes, most } => {
                write!(f, "the tokens have {bytes} bytes or more together, and a vocabulary holds {most}")
            }
            Error::BadMerge { token } => write!(f, "a merge uses token {token} before it exists"),
            Error::NotAByte { token } => {
                write!(f, "tokens 0 to 255 must be the byte values in their order, but token {token} is not")
            }
            Error::NotAMerge { token, parts } => write!(
                f,
                "token {token} must be made of two earlier tokens, but its bytes give {parts}: the vocabulary is \
                 damaged, or not a byte pair encoding in the order in which it was learned"
            ),
            Error::UnknownId { index, id, vocab_size } => {
                write!(f, "unknown token id {id} at index {index}: ids run from 0 to {}", vocab_size - 1)
            }
            Error::Untrained => write!(f, "the tokenizer has no split pattern yet: call train_from_iterator first"),
            Error::Stopped => write!(f, "stopped by the caller"),
        }
    }
}

impl std::error::Error for Error {}
