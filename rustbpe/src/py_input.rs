//! From Python to the core: texts, numbers and files, with errors that say what was wrong.

use std::borrow::Cow;
use std::path::Path;

use pyo3::exceptions::{PyOSError, PyOverflowError, PyTypeError, PyUnicodeEncodeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PyString};

use crate::py_output::detached;
use crate::{Batch, Pair, Tokens};

/// While texts are read, Ctrl-C is checked after this many.
const TEXTS_PER_CHECK: usize = 4096;

/// The texts of a Python iterable.
pub struct Texts<'py> {
    iterator: Bound<'py, PyIterator>,
    name: &'static str,
    /// How many texts have been read.
    read: usize,
}

impl<'py> Texts<'py> {
    pub fn new(iterable: &Bound<'py, PyAny>, name: &'static str) -> PyResult<Self> {
        if iterable.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err(format!("{name} must be an iterable of str, got one str: give [text]")));
        }
        Ok(Self { iterator: iterable.try_iter()?, name, read: 0 })
    }

    fn next(&mut self, py: Python<'py>) -> PyResult<Option<OneText<'py>>> {
        let Some(text) = self.iterator.next() else { return Ok(None) };
        let text = OneText::named(&text?, || format!("item {} of {}", self.read, self.name))?;
        self.read += 1;
        if self.read % TEXTS_PER_CHECK == 0 {
            py.check_signals()?;
        }
        Ok(Some(text))
    }

    /// Copy texts into an empty batch until it has `most` texts or `bytes` bytes. False if no text was left.
    pub fn fill(&mut self, py: Python<'py>, batch: &mut Batch, most: usize, bytes: usize) -> PyResult<bool> {
        py.check_signals()?;
        while batch.ends.len() < most && batch.text.len() < bytes {
            let Some(text) = self.next(py)? else { break };
            batch.push(text.as_str()?);
        }
        Ok(!batch.ends.is_empty())
    }

    /// The next texts, about `bytes` bytes in all, without a copy. While they are held, threads may read them without
    /// the interpreter's lock.
    pub fn hold(&mut self, py: Python<'py>, bytes: usize) -> PyResult<Vec<OneText<'py>>> {
        py.check_signals()?;
        let (mut held, mut size) = (Vec::new(), 0);
        while size < bytes {
            let Some(text) = self.next(py)? else { break };
            size += text.as_str()?.len();
            held.push(text);
        }
        Ok(held)
    }
}

/// The UTF-8 of a Python str.
pub enum OneText<'py> {
    /// The interpreter stores ASCII text as UTF-8 already.
    Ascii(Bound<'py, PyString>),
    /// Encoded here, because PyString::to_str would leave a second copy of the text inside the str object.
    Other(Bound<'py, PyBytes>),
}

impl<'py> OneText<'py> {
    pub fn new(text: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::named(text, || "text".to_string())
    }

    /// A TypeError for anything but str, and a UnicodeEncodeError for a lone surrogate; both name the text.
    fn named(text: &Bound<'py, PyAny>, name: impl Fn() -> String) -> PyResult<Self> {
        let Ok(text) = text.cast::<PyString>() else {
            let message = format!("{} must be str, got {}", name(), text.get_type().name()?);
            return Err(PyTypeError::new_err(message));
        };
        if text.call_method0(pyo3::intern!(text.py(), "isascii"))?.is_truthy()? {
            return Ok(Self::Ascii(text.clone()));
        }
        let bytes = text.encode_utf8().map_err(|error| name_surrogate(text.py(), error, &name()))?;
        Ok(Self::Other(bytes))
    }

    pub fn as_str(&self) -> PyResult<&str> {
        match self {
            Self::Ascii(text) => text.to_str(),
            // SAFETY: the interpreter's encoder made these bytes, and it only writes UTF-8.
            Self::Other(bytes) => Ok(unsafe { std::str::from_utf8_unchecked(bytes.as_bytes()) }),
        }
    }
}

/// The interpreter's error for a lone surrogate, which has the position, with the name of the text added.
fn name_surrogate(py: Python<'_>, error: PyErr, what: &str) -> PyErr {
    if !error.is_instance_of::<PyUnicodeEncodeError>(py) {
        return error;
    }
    let renamed = || -> PyResult<PyErr> {
        let value = error.value(py);
        let (encoding, text) = (value.getattr("encoding")?.unbind(), value.getattr("object")?.unbind());
        let (start, end) = (value.getattr("start")?.extract::<usize>()?, value.getattr("end")?.extract::<usize>()?);
        let reason = format!("{} ({what})", value.getattr("reason")?);
        Ok(PyUnicodeEncodeError::new_err((encoding, text, start, end, reason)))
    };
    renamed().unwrap_or(error)
}

/// The text of a file. An OSError like `open`'s if it cannot be read, a ValueError if it is not UTF-8.
pub fn file_text(py: Python<'_>, path: &Path) -> PyResult<String> {
    let bytes = detached(py, || std::fs::read(path))?.map_err(|error| match error.raw_os_error() {
        Some(code) => PyOSError::new_err((code, error.to_string(), path.display().to_string())),
        None => PyErr::from(error),
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        PyValueError::new_err(format!("{} is not UTF-8: byte {at} does not begin a character", path.display()))
    })
}

/// An int from `smallest` to `largest`; TypeError or ValueError with `name` for anything else.
pub fn whole_number(given: &Bound<'_, PyAny>, name: &str, smallest: u64, largest: u64) -> PyResult<u64> {
    match given.extract::<u64>() {
        Ok(number) if (smallest..=largest).contains(&number) => Ok(number),
        Err(error) if !error.is_instance_of::<PyOverflowError>(given.py()) => {
            Err(PyTypeError::new_err(format!("{name} must be int, got {}", given.get_type().name()?)))
        }
        _ if largest == u64::MAX => {
            Err(PyValueError::new_err(format!("{name} must be at least {smallest}, got {given}")))
        }
        _ => Err(PyValueError::new_err(format!("{name} must be from {smallest} to {largest}, got {given}"))),
    }
}

/// The bytes of every token; TypeError with its index for anything but bytes.
pub fn all_tokens(given: &Bound<'_, PyAny>) -> PyResult<Tokens> {
    // The items of a list are not held: changing their counts would write to all the memory that they are in, which a
    // process that was forked then has to copy.
    let Ok(list) = given.cast::<PyList>() else {
        let given: Vec<Bound<'_, PyAny>> = given.extract()?;
        let mut tokens = Tokens::with_capacity(given.len());
        given.iter().enumerate().try_for_each(|(index, token)| add_token(&mut tokens, token, index))?;
        return Ok(tokens);
    };
    let mut tokens = Tokens::with_capacity(list.len());
    for index in 0..list.len() {
        // SAFETY: the interpreter's lock is held, the list has this item, and no Python code runs while it is borrowed.
        let exact = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t);
            if item.is_null() {
                return Err(PyErr::fetch(given.py()));
            }
            (ffi::PyBytes_Check(item) != 0).then(|| {
                std::slice::from_raw_parts(ffi::PyBytes_AsString(item).cast(), ffi::PyBytes_Size(item) as usize)
            })
        };
        match exact {
            Some(token) => tokens.push(token)?,
            None => add_token(&mut tokens, &list.get_item(index)?, index)?,
        }
    }
    Ok(tokens)
}

fn add_token(tokens: &mut Tokens, given: &Bound<'_, PyAny>, index: usize) -> PyResult<()> {
    match given.extract::<Cow<'_, [u8]>>() {
        Ok(bytes) => Ok(tokens.push(&bytes)?),
        Err(_) => {
            let given = given.get_type().name()?;
            Err(PyTypeError::new_err(format!("item {index} of tokens must be bytes, got {given}")))
        }
    }
}

/// An id as the core takes it; TypeError or ValueError with its index for anything else.
pub fn token_id(given: &Bound<'_, PyAny>, index: usize, vocab_size: u32) -> PyResult<u32> {
    given.extract::<u32>().or_else(|error| {
        if !error.is_instance_of::<PyOverflowError>(given.py()) {
            return Err(PyTypeError::new_err(format!(
                "item {index} of ids must be int, got {}",
                given.get_type().name()?
            )));
        }
        let last = vocab_size - 1;
        Err(PyValueError::new_err(format!("unknown token id {given} at index {index}: ids run from 0 to {last}")))
    })
}

/// Read merges from the bytes of a pickle.
pub fn merges_from(bytes: &[u8]) -> PyResult<Vec<Pair>> {
    let pairs = bytes.chunks_exact(8);
    if !pairs.remainder().is_empty() {
        return Err(PyValueError::new_err(format!("merges must have 8 bytes each, got {} bytes in all", bytes.len())));
    }
    let number = |bytes: &[u8]| bytes.try_into().map(u32::from_ne_bytes).unwrap_or_default();
    Ok(pairs.map(|pair| (number(&pair[..4]), number(&pair[4..]))).collect())
}
