//! The Python module: arguments, results and errors of the core, converted.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pyo3::exceptions::{
    PyKeyboardInterrupt, PyOverflowError, PyRuntimeError, PyTypeError, PyUnicodeDecodeError, PyUnicodeEncodeError,
    PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyString};

use crate::{threads, train, Batch, Error, Feed, Model, Scratch, Splitter, GPT4_PATTERN, MAX_VOCAB_SIZE};

/// Texts are handed to the threads when they fill this much, however many they are.
const BUFFER_BYTES: usize = 1 << 20;
/// While texts are read, Ctrl-C is looked for after this many.
const TEXTS_PER_CHECK: usize = 4096;
/// While merges are learned, Ctrl-C is looked for this often.
const CHECK_EVERY: Duration = Duration::from_millis(100);

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Stopped => PyKeyboardInterrupt::new_err(()),
            error => PyValueError::new_err(error.to_string()),
        }
    }
}

/// A byte pair encoding: train it on texts, then encode and decode. Before training it knows the 256 byte values.
#[pyclass(frozen, module = "rustbpe")]
struct Tokenizer {
    model: RwLock<Arc<Model>>,
}

#[pymethods]
impl Tokenizer {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { model: RwLock::new(Arc::new(Model::new(None, &[])?)) })
    }

    /// Learn merges from an iterable of str until there are `vocab_size` tokens, 256 byte values included.
    ///
    /// A text with too few distinct pairs gives fewer tokens: compare `vocab_size` afterwards. Texts are read
    /// `buffer_size` at a time (fewer if they are long) and split by `pattern` (default: GPT-4's), which must cover
    /// them. If anything raises, the tokenizer stays as it was.
    #[pyo3(signature = (iterator, vocab_size, buffer_size=None, pattern=None))]
    #[pyo3(text_signature = "($self, iterator, vocab_size, buffer_size=8192, pattern=None)")]
    fn train_from_iterator(
        &self,
        py: Python<'_>,
        iterator: &Bound<'_, PyAny>,
        vocab_size: &Bound<'_, PyAny>,
        buffer_size: Option<&Bound<'_, PyAny>>,
        pattern: Option<&str>,
    ) -> PyResult<()> {
        let vocab_size = whole_number(
            vocab_size,
            "vocab_size (256 byte values and the merges)",
            crate::BYTES.into(),
            MAX_VOCAB_SIZE.into(),
        )? as u32;
        let buffer_size = match buffer_size {
            Some(given) => whole_number(given, "buffer_size", 1, u64::MAX)?.try_into().unwrap_or(usize::MAX),
            None => 8192,
        };
        let splitter = detached(py, || Splitter::new(pattern.unwrap_or(GPT4_PATTERN)))??;
        let mut texts = Texts::new(iterator, "iterator")?;
        let mut feed = Feed::new(&splitter, threads());
        let mut batch = Batch::default();
        let counts = loop {
            if !texts.fill(py, &mut batch, buffer_size, BUFFER_BYTES)? {
                break detached(py, || feed.finish())?;
            }
            let sent = std::mem::take(&mut batch);
            match detached(py, || feed.send(sent))? {
                Some(empty) => batch = empty,
                None => break detached(py, || feed.finish())?,
            }
        };
        let counts = counts.map_err(|(index, error)| in_item(error, "iterator", index))?;
        let mut checked = Instant::now();
        let mut interrupt = None;
        let proceed = |_| {
            if checked.elapsed() >= CHECK_EVERY {
                checked = Instant::now();
                interrupt = Python::attach(|py| py.check_signals()).err();
            }
            interrupt.is_none()
        };
        let merges = detached(py, || train(counts, vocab_size, proceed))?;
        if let Some(interrupt) = interrupt {
            return Err(interrupt);
        }
        let model = Model::new(Some(splitter), &merges?)?;
        *self.model.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(model);
        Ok(())
    }

    /// The token ids of `text`. There are no special tokens: their spellings are text like any other.
    fn encode(&self, py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let mut copy = String::new();
        append(text, &mut copy, || "text".to_string())?;
        let model = self.model();
        let mut ids = Vec::new();
        detached(py, || model.encode(&copy, &mut Scratch::default(), &mut ids))??;
        Ok(ids)
    }

    /// The same as `encode`, under tiktoken's name for it.
    fn encode_ordinary(&self, py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        self.encode(py, text)
    }

    /// The token ids of each of `texts`, in their order, encoded on all threads.
    fn batch_encode(&self, py: Python<'_>, texts: &Bound<'_, PyAny>) -> PyResult<Vec<Py<PyAny>>> {
        let model = self.model();
        let mut texts = Texts::new(texts, "texts")?;
        let mut batch = Batch::default();
        texts.fill(py, &mut batch, usize::MAX, usize::MAX)?;
        let mut lists = Vec::new();
        let mut scratch = Scratch::default();
        for (index, text) in batch.texts().enumerate() {
            let mut ids = Vec::new();
            model.encode(text, &mut scratch, &mut ids).map_err(|error| in_item(error, "texts", index))?;
            lists.push(ids.into_pyobject(py)?.into_any().unbind());
        }
        Ok(lists)
    }

    /// The text of token ids. Raises UnicodeDecodeError if their bytes are not whole characters.
    fn decode<'py>(&self, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
        let model = self.model();
        let mut known = Vec::new();
        for (index, id) in ids.try_iter()?.enumerate() {
            known.push(token_id(&id?, index, &model)?);
        }
        PyString::from_bytes(ids.py(), &model.decode(&known)?)
    }

    /// The number of tokens: 256 byte values and the learned merges.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.model().vocab_size()
    }

    /// The split pattern; empty before training.
    fn get_pattern(&self) -> String {
        self.model().pattern().unwrap_or_default().to_string()
    }

    /// The bytes and the id of every token, by id: what tiktoken's Encoding wants as a dict.
    fn get_mergeable_ranks(&self, py: Python<'_>) -> Vec<(Py<PyBytes>, u32)> {
        self.model().tokens().zip(0..).map(|(bytes, id)| (PyBytes::new(py, bytes).unbind(), id)).collect()
    }
}

impl Tokenizer {
    fn model(&self) -> Arc<Model> {
        Arc::clone(&self.model.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Texts of a Python iterable, copied so that threads can read them without the interpreter.
struct Texts<'py> {
    iterator: Bound<'py, PyIterator>,
    name: &'static str,
}

impl<'py> Texts<'py> {
    fn new(iterable: &Bound<'py, PyAny>, name: &'static str) -> PyResult<Self> {
        if iterable.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err(format!("{name} must be an iterable of str, got one str: give [text]")));
        }
        Ok(Self { iterator: iterable.try_iter()?, name })
    }

    /// Read the next texts into an empty batch, until there are `most` or they have `bytes`; false if there are none.
    fn fill(&mut self, py: Python<'py>, batch: &mut Batch, most: usize, bytes: usize) -> PyResult<bool> {
        py.check_signals()?;
        while batch.ends.len() < most && batch.text.len() < bytes {
            let Some(text) = self.iterator.next() else { break };
            append(&text?, &mut batch.text, || format!("item {} of {}", batch.first + batch.ends.len(), self.name))?;
            batch.ends.push(batch.text.len());
            if batch.ends.len() % TEXTS_PER_CHECK == 0 {
                py.check_signals()?;
            }
        }
        Ok(!batch.ends.is_empty())
    }
}

/// Append a Python str. Anything else is a TypeError, a lone surrogate a UnicodeEncodeError, naming `what`.
fn append(text: &Bound<'_, PyAny>, buffer: &mut String, what: impl Fn() -> String) -> PyResult<()> {
    let Ok(text) = text.cast::<PyString>() else {
        let message = format!("{} must be str, got {}", what(), text.get_type().name()?);
        return Err(PyTypeError::new_err(message));
    };
    // Not to_str: that would keep a second copy of every text that is not ASCII inside the str object.
    let bytes = text.encode_utf8().map_err(|error| name_surrogate(text.py(), error, &what()))?;
    let checked = std::str::from_utf8(bytes.as_bytes());
    buffer.push_str(
        checked.map_err(|error| PyUnicodeDecodeError::new_err_from_utf8(text.py(), bytes.as_bytes(), error))?,
    );
    Ok(())
}

/// The interpreter's own error for a lone surrogate (it has the position), with the text it is in.
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

fn in_item(error: Error, name: &str, index: usize) -> PyErr {
    PyValueError::new_err(format!("item {index} of {name}: {error}"))
}

fn whole_number(given: &Bound<'_, PyAny>, name: &str, smallest: u64, largest: u64) -> PyResult<u64> {
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

fn token_id(given: &Bound<'_, PyAny>, index: usize, model: &Model) -> PyResult<u32> {
    given.extract::<u32>().or_else(|error| {
        if !error.is_instance_of::<PyOverflowError>(given.py()) {
            return Err(PyTypeError::new_err(format!(
                "item {index} of ids must be int, got {}",
                given.get_type().name()?
            )));
        }
        let last = model.vocab_size() - 1;
        Err(PyValueError::new_err(format!("unknown token id {given} at index {index}: ids run from 0 to {last}")))
    })
}

/// Run `work` without holding the interpreter. A panic, which would be a mistake in this crate, becomes an exception.
fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(work)))
        .map_err(|_| PyRuntimeError::new_err("internal error in rustbpe, see standard error; please report it"))
}

#[pymodule]
mod rustbpe {
    #[pymodule_export]
    use super::Tokenizer;
}
