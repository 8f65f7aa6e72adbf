//! From the core to Python: errors, arrays, and work without the interpreter's lock.

use std::panic::{catch_unwind, AssertUnwindSafe};

use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::{Error, Pair};

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Stopped => PyKeyboardInterrupt::new_err(()),
            error => PyValueError::new_err(error.to_string()),
        }
    }
}

/// An error in one of many texts, with the name of that text.
pub fn in_item(error: Error, name: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: {error}"))
}

/// Run `work` without the interpreter's lock. A panic is a bug in this crate, and becomes an exception.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(work)))
        .map_err(|_| PyRuntimeError::new_err("internal error in rustbpe; please report the details on standard error"))
}

/// A writable numpy array of these bytes.
pub fn array<'py>(py: Python<'py>, bytes: Vec<u8>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    over(PyByteArray::new(py, &bytes).into_any(), dtype)
}

fn over<'py>(buffer: Bound<'py, PyAny>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    let numpy = buffer.py().import("numpy")?;
    numpy.call_method1("frombuffer", (&buffer, numpy.getattr(dtype)?))
}

/// Collects the ids of many texts for numpy.
pub struct Ids<'py> {
    /// All ids so far, in a bytearray: it grows in place, and numpy uses its memory without a copy.
    ids: Bound<'py, PyAny>,
    /// Whether ids are uint16, because the whole vocabulary fits; otherwise uint32.
    narrow: bool,
    number: usize,
    ends: Vec<u8>,
}

impl<'py> Ids<'py> {
    pub fn new(py: Python<'py>, vocab_size: u32) -> Self {
        let ids = PyByteArray::new(py, &[]).into_any();
        Self { ids, narrow: vocab_size <= 1 << 16, number: 0, ends: Vec::new() }
    }

    /// Append the ids of some texts, and where each text's ids end.
    pub fn add(&mut self, ids: &[u32], ends: &[usize]) -> PyResult<()> {
        let width = if self.narrow { 2 } else { 4 };
        let new = PyBytes::new_with(self.ids.py(), width * ids.len(), |bytes| {
            if self.narrow {
                let places = bytes.chunks_exact_mut(2).zip(ids);
                places.for_each(|(place, &id)| place.copy_from_slice(&(id as u16).to_ne_bytes()));
            } else {
                let places = bytes.chunks_exact_mut(4).zip(ids);
                places.for_each(|(place, &id)| place.copy_from_slice(&id.to_ne_bytes()));
            }
            Ok(())
        })?;
        self.ids = self.ids.call_method1(intern!(self.ids.py(), "__iadd__"), (new,))?;
        self.ends.extend(ends.iter().flat_map(|&end| ((self.number + end) as u64).to_ne_bytes()));
        self.number += ids.len();
        Ok(())
    }

    /// All ids, and where each text's ids end.
    pub fn finish(self) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let ends = array(self.ids.py(), self.ends, "uint64")?;
        Ok((over(self.ids, if self.narrow { "uint16" } else { "uint32" })?, ends))
    }
}

/// Merges as bytes, for pickles and arrays.
pub fn merge_bytes(merges: &[Pair]) -> Vec<u8> {
    merges.iter().flat_map(|&(left, right)| [left.to_ne_bytes(), right.to_ne_bytes()]).flatten().collect()
}
