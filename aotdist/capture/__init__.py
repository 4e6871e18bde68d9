"""From a call to a `Program`: flat tensors in, names on everything.

Promises: every tensor that the call can reach is an input with a place to read it from; constants are part of
the signature; the user's objects are afterwards what they were before.

Capture
-------
A call is inspected once. Its arguments are flattened, and the target is walked for what it can reach without
being given it (`capture/reach.py`): cells, globals, defaults, `functools.partial`, attributes of the user's
own objects, and what their special methods and library containers read. Modules found this way have their
parameters and buffers lifted, tied ones once. Other tensors are lifted only if the trace touches them: a
torch-function mode (`CaptureMode` in `trace/capture_mode.py`) substitutes a stand-in for each real tensor
that it sees, and names it by the place where the walk found it. A tensor that the walk did not reach is kept
by identity.

During the trace, stand-ins replace the parameters in the modules. They stay there until the backward has been
traced, because hooks of the backward (activation checkpointing) may run a forward again.

**Threads.** No other thread sees that: the one that captures has the attributes, parameters and buffers of
the modules for itself (`torch_seam/own_attributes.py`). While it does, the methods of `nn.Module` that get
and set attributes ask which thread calls, and give this one its own `__dict__`. What a rule puts into a
module (FSDP2's hooks) and what the program assigns to it lands there, too; attributes that still hold an
object when the trace is over are then handed to the module. `Source` reads a place of a module in the
thread's own dictionary, so guards and results name the shared one. Functions of PyTorch are replaced by ones
that ask for the thread (`torch_seam/patches.py`); a thread of the autograd engine counts as the one whose
backward it runs, which it knows by the modes that the engine hands on. Of the alternatives, a copy of the
module tree would lose what is known by identity (closures, hooks, tied modules, FSDP2's records), and leaving
parameters in place for `CaptureMode` to replace would show real tensors to the methods of wrappers.

**Interrupts and forks.** What a compilation changes is changed in contexts, which put it back whatever leaves
them, a `KeyboardInterrupt` too. One that arrives in the microseconds between the methods of a context manager
and its block finds a context open, as anywhere in Python. In a process that is forked while another thread
compiles, locks are free, and PyTorch's functions are its own (`capture/compile_lock.py`).

**Reads of data.** A program that reads a tensor's data (`if mask.all()`) is rejected, unless the value is the
same at every call: computed from no argument and no random number, for example positions and masks derived
from sizes. Then the nodes that lead to it are run at once (`trace/numbers/data_guards.py`). Modules of
PyTorch itself and of transformers may choose by data of arguments and buffers: they ask whether a mask is the
causal one, or pads anything. The answer at capture becomes part of the signature, and each call asks again
before it runs, with its own sizes where these are symbolic (`trace/numbers/data_guards.py`). Where an encoder
asks whether padding is at the end, its layers become operators that ask when they run
(`trace/operators/padded_batches.py`). Checks that PyTorch makes of data (of distributions, of variances) are
outputs of the graph, and raise eager's error afterwards (`capture/checks.py`); so are those that its
functions make in C++ (`istft`, `cov`), which get the answer to go on with
(`trace/operators/functions_of_data.py`).

**Corrections.** `trace/operators/corrections.py` is the table of what PyTorch does otherwise in a trace than
in eager: at which level (functions, operators, nodes, fakes), what is called instead, why, and the last
release that was seen to need it; `tests/trace/test_corrections.py` takes out one row after the other, and
each time a program goes wrong. Some hold only where results are to have eager's bits: PyTorch chooses the
formula of a loss by data, or by whether a tensor is a plain one (`trace/operators/functions_of_data.py`).
What needs data is an operator that decides when it runs.

**Results.** A result in an object that is not a pytree is created anew at every call, as in eager
(`capture/instances.py`).

**Objects among the arguments** are of two kinds (`capture/instances.py`):

- Code (a module, a function, a method, a class) is part of the signature by identity, and walked like the
  target.
- Any other object with attributes, slots or items is data. It is flattened once, wherever it occurs
  (`capture/arguments.py`): its tensors are inputs, its constants part of the signature. The trace gets an
  empty instance of its class, filled with stand-ins; afterwards the instance is compared with its original
  state, and the difference is replayed on the caller's object (`capture/argument_mutation.py`). A number that
  differs becomes a symbol in a second trace, as do such numbers in the target (`NumberLeaf`).

The alternative for data, treating the object as a place like those that a function closes over, would make
each batch a new signature, since places are known by identity. What hangs on such an object and is neither
code nor data (a lock, an iterator) becomes a stand-in that raises an error when it is read
(`capture/constants.py`); most programs do not read it.

**Tensor classes without `__tensor_flatten__`.** The stand-in of a parameter whose class has methods and
attributes is an instance of that class, too (`trace/stand_ins.py`), and tensors may have attributes, which
results are given last (`capture/results.py`). A class whose `__torch_function__` makes something of functions
is refused (`subclasses/protocol.py`): its say in every function would have to be kept beside every operator.
Conversions (`as_subclass`, `_make_subclass`, calls of a class) are no torch functions and are intercepted
(`trace/classes.py`). Attributes of an argument are read from that argument, at a place that begins at it.

What a program assigns
----------------------
An assignment runs at capture, on stand-ins; it is undone, and replayed at every call. All that a call, or a
backward, does in Python is one log of effects (`capture/effects.py`): `Assign`, `Add`, `Delete`, `Print`,
found by comparing what is there with what was there (`capture/watched.py`). Results of the graph stand in it
by position. What is assigned decides how it is replayed:

- **Tensors** (`self.n = self.n + 1`) are additional outputs of the program, assigned at every call
  (`capture/assignments.py`).
- **Places** begin at the target, never at an object on the way to it, since that object may be replaced; so
  the assignment reaches the object that the call finds (`Held` in `capture/source.py`).
- **Tensors inside objects that are not pytrees** are rejected, since a stand-in would stay in the object
  (`capture/leaked_tensors.py`).
- **Constants** are restored after capture and assigned at every call; an artifact is specialised on the value
  that its call found (`capture/assignments.py`).
- **Counters**: a number that the program finds and changes would make every call a new signature, so the
  program is traced once more with a symbol in its place, which is read at each call as sizes are
  (`trace/numbers/symbols.py`).
- **Numbers that are read off tensors** (`self.loss = loss.item()`) are read once the call has run, see
  Numbers that depend on data; a number that the program finds in their place is a counter, so that the next
  call fits.
- **Setup flags**, which only record that something was set up, are tried with the value that the next call
  will find; if the program is the same, it is compiled for that value (`assumptions.py`).
- **Changes in the backward** by hooks, autograd functions and checkpoints are a log of their own, replayed
  after every backward (`capture/in_backward.py`):
    - A backward finds other numbers than its forward left, so these are other symbols, and a number counts as
      a counter only if the difference is known.
    - The changes hold for a backward that finds what the one at capture found, where the program may read a
      place.
    - If a backward finds another object in the place of one that it changes, the call has another signature.
    - Tensors that it keeps are results of the backward graph (role `kept`), separately for each choice of
      results.
- **`.grad`**: the gradients that inputs have when the call begins are inputs, too, added when the program
  asks for them (`trace/capture_mode.py`).

`print`, and loggers that the user's code calls, are noted (`capture/prints.py`): what they are given are more
outputs, copied when they are called, and every call makes them, in order, when it has run; those of a
backward are among its changes. Other Python side effects happen only at capture. If a program leaves an
object (`self.cache = Cache()`), it is traced once more with it; if it is another program then, the first
artifact is for the call at hand only.

What a program asks of an input besides its data is part of the signature, as far as it asks: attributes of
tensors by name, what autograd knows (`is_leaf`, `_version`, whether there is a `grad_fn`, or a `_base`, which
is then one more input), and the values of context variables, weak references, the environment and NumPy
arrays (`capture/readers.py`). A NumPy array that becomes a tensor is read through that tensor instead.
"""
