//! Lists of ids.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

/// Makes lists of ids. Ids repeat, so each int object is made once, when it is first needed.
#[derive(Default)]
pub struct Lists(Mutex<Vec<Option<Py<PyInt>>>>);

impl Lists {
    /// A list of these ids of a vocabulary with `vocab_size` tokens.
    pub fn of<'py>(&self, py: Python<'py>, ids: &[u32], vocab_size: u32) -> PyResult<Bound<'py, PyList>> {
        // Making a list may collect garbage, and that may run Python code which is here again.
        let Ok(mut known) = self.0.try_lock() else { return PyList::new(py, ids) };
        if known.len() < vocab_size as usize {
            known.resize_with(vocab_size as usize, || None);
        }
        let number = |&id: &u32| known[id as usize].get_or_insert_with(|| int(py, id)).clone_ref(py);
        PyList::new(py, ids.iter().map(number))
    }
}

#[cold]
fn int(py: Python<'_>, id: u32) -> Py<PyInt> {
    match id.into_pyobject(py) {
        Ok(number) => number.unbind(),
        Err(never) => match never {},
    }
}
