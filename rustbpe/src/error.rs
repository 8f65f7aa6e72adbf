//! Everything that can go wrong in the core, with messages for the user.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The vocabulary must hold the 256 byte values, and its ids must fit the trainer's symbols.
    VocabSize { given: u64 },
    /// The split pattern does not compile.
    Pattern { message: String },
    /// The split pattern matches nothing at this character, so text would be lost.
    NotCovered { character: usize, excerpt: String },
    /// The regular expression engine gave up in the piece that starts at this character: too much backtracking.
    Matching { character: usize, message: String },
    /// The distinct pieces have more bytes than 32-bit positions can address.
    TooMuchText { bytes: u64 },
    /// All tokens together have too many bytes for the trie's node numbers.
    TooLongTokens { bytes: usize, most: usize },
    /// A merge uses a token that does not exist yet.
    BadMerge { token: u32 },
    /// The first 256 tokens must be the byte values in order.
    NotAByte { token: u32 },
    /// Merging the bytes of a token must end with two earlier tokens.
    NotAMerge { token: u32, parts: usize },
    /// This id is outside the vocabulary.
    UnknownId { index: usize, id: u32, vocab_size: u32 },
    /// Encoding needs a split pattern, and training has not set one yet.
    Untrained,
    /// The caller asked training to stop.
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
            Error::Pattern { message } => write!(f, "pattern must be a valid regular expression: {message}"),
            Error::NotCovered { character, excerpt } => write!(
                f,
                "pattern does not cover the text: it matches nothing at character {character} ({excerpt:?}), and that \
                 text would be lost; add an alternative that matches every other character, such as |\\s+|\\S"
            ),
            Error::Matching { character, message } => {
                write!(
                    f,
                    "pattern could not be matched from character {character} on: {message}; simplify the pattern, or \
                     split the text"
                )
            }
            Error::TooMuchText { bytes } => write!(
                f,
                "the distinct pieces of the text have {bytes} bytes, and the trainer holds at most {}; train on a \
                 sample of the text, or with a pattern that makes shorter pieces",
                u32::MAX
            ),
            Error::TooLongTokens { bytes, most } => {
                write!(
                    f,
                    "all tokens together must have at most {most} bytes, got {bytes} or more; use a smaller \
                     vocabulary, or a pattern that makes shorter pieces"
                )
            }
            Error::BadMerge { token } => {
                write!(f, "a merge uses token {token} before it exists: the merges are damaged or out of order")
            }
            Error::NotAByte { token } => {
                write!(f, "tokens 0 to 255 must be the byte values in order, but token {token} is not")
            }
            Error::NotAMerge { token, parts } => write!(
                f,
                "token {token} must be made of two earlier tokens, but its bytes merge to {parts}: the vocabulary is \
                 damaged, or it is not a byte pair encoding in the order learned"
            ),
            Error::UnknownId { index, id, vocab_size } => {
                write!(f, "unknown token id {id} at index {index}: ids run from 0 to {}", vocab_size - 1)
            }
            Error::Untrained => {
                write!(f, "the tokenizer cannot encode before training: call train_from_iterator first")
            }
            Error::Stopped => write!(f, "training was stopped by the caller"),
        }
    }
}

impl std::error::Error for Error {}
