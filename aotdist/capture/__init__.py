"""From a call to a `Program`: flat tensors in, names on everything.

Promises: every tensor that the call can reach is an input with a place to read it from; constants are part of
the signature; the user's objects are afterwards as they were before.

Capture
-------
A call is inspected once. Its arguments are flattened (`capture/arguments.py`), and the target is walked for
what it can reach besides these (`capture/reach.py`): cells, globals, defaults, `functools.partial`,
attributes of the user's objects, and what their special methods and library containers read. The parameters
and buffers of modules that are found become inputs, tied ones once. Other tensors become inputs only if the
trace uses them: a torch-function mode (`trace/capture_mode.py`) substitutes a stand-in for each real tensor
that it sees, and names it by the place where the walk found it. A tensor that the walk did not find is kept
by identity.

During the trace, stand-ins replace the parameters in the modules. They stay there until the backward has been
traced, because its hooks (activation checkpointing) may run a forward again.

**Threads.** Other threads do not see that: the thread that captures has its own attributes, parameters and
buffers of the modules (`torch_seam/modules.py`). The methods of `nn.Module` that get and set
attributes ask which thread calls, and give this one its own `__dict__`. What a rule puts into a module
(FSDP2's hooks) and what the program assigns to it is stored there, too; after the trace, attributes that
still hold an object are copied to the module. `Source` reads a place of a module in the thread's own
dictionary, so guards and results name the shared one. Functions of PyTorch that a capture replaces ask for
the thread, too (`torch_seam/patches.py`); a thread of the autograd engine counts as the one whose backward it
runs, which it knows by the modes that the engine passes on. There were two alternatives: a copy of the module
tree would lose what is known by identity (closures, hooks, tied modules, FSDP2's records); and if parameters
stayed in place for `CaptureMode` to replace, methods of wrappers would see real tensors.

**Interrupts and forks.** Whatever a compilation changes is restored by context managers, also after a
`KeyboardInterrupt`; one in the microseconds between the methods of a context manager and its block finds a
context open, as anywhere in Python. In a process that is forked while another thread compiles, locks are
free, and PyTorch's functions are its own (`capture/compile_lock.py`).

**Reads of data.** A program that reads a tensor's data (`if mask.all()`) is rejected, unless the value is the
same at every call: computed from no argument and no random number, for example positions and masks derived
from sizes. Then the nodes behind it are run at once (`trace/numbers/data_guards.py`). Modules of PyTorch and
of transformers may branch on data of arguments and buffers: whether a mask is causal, or pads anything. Their
answer at capture becomes part of the signature, and each call asks again before it runs. An encoder that asks
whether padding is at the end is answered no: its layers are given the mask
(`trace/operators/padded_batches.py`). Checks of data by PyTorch (of distributions, of variances) are outputs
of the graph, and raise eager's error afterwards (`capture/effects.py`); so are those that its functions make
in C++ (`istft`, `cov`), which get the expected answer in the trace (`trace/operators/functions_of_data.py`).

**Corrections.** `trace/operators/corrections.py` is the table of what PyTorch does otherwise in a trace than
in eager: at which level (functions, operators, nodes, fakes), what is called instead, why, and the last
release that was seen to need it; `tests/trace/test_corrections.py` removes one row after the other, and each
time a program goes wrong. Some only apply where results are to have eager's bits: PyTorch chooses the
formula of a loss by data, or by whether a tensor is a plain one (`trace/operators/functions_of_data.py`).
Whatever needs data is an operator that decides when it runs.

**Objects among the arguments** are of two kinds (`capture/instances.py`):

- Code (a module, a function, a method, a class) is part of the signature by identity, and walked like the
  target.
- Any other object with attributes, slots or items is data. It is flattened once, wherever it occurs: its
  tensors are inputs, its constants part of the signature. The trace gets a new instance of its class with
  stand-ins in it; afterwards the instance is compared with its original state, and every call repeats the
  difference on the caller's object (`capture/argument_mutation.py`). A number that differs becomes a symbol
  in a second trace, as do such numbers in the target (`NumberLeaf`).

If data were a place, like the objects that a function closes over, each batch would have a new signature,
since places are known by identity. A value in such an object that is neither code nor data (a lock, an
iterator) becomes a stand-in that raises an error when it is read (`capture/constants.py`); most programs do
not read it. A result in an object that is no pytree is made anew at every call, as in eager.

**Tensor classes without `__tensor_flatten__`.** The stand-in of a parameter whose class has methods and
attributes is an instance of that class, too (`trace/stand_ins.py`). Attributes of inputs are watched like
those of objects; a computed tensor with some cannot be returned (`capture/results.py`). A class whose
`__torch_function__` changes what functions do is refused (`subclasses/protocol.py`): every operator would
have to be recorded with what it makes of it. Conversions (`as_subclass`, `_make_subclass`, calls of a class)
are no torch functions and are intercepted (`trace/classes.py`). Attributes of an argument are read from that
argument, at a place that begins at it.

What a program assigns
----------------------
An assignment runs at capture, on stand-ins; it is undone, and every call repeats it. Everything that a call,
or a backward, does in Python is one log of effects (`capture/effects.py`): `Assign` and `Delete`, found by
comparing snapshots (`capture/watched.py`), `Print` and `Check`. Tensors in it are positions of graph outputs.
How an assignment is repeated depends on what is assigned:

- **Tensors** (`self.n = self.n + 1`) are additional outputs of the program (`capture/assignments.py`).
- **Places** begin at the target, never at an object on the way to it, since that object may be replaced; so
  the assignment reaches the object that the call finds (`Held` in `capture/source.py`).
- **Objects of the user's classes that the program makes** are made anew at each call, as those that it
  returns (`capture/instances.py`), and so are others with tensors in them. What cannot be made anew (a
  module, a set of tensors) is rejected, since a stand-in would stay in it (`capture/leaked_tensors.py`).
- **Constants** are assigned as they were at capture; an artifact is specialised on the value that its call
  found.
- **Counters**: a number that the program finds and changes would make every call a new signature. So the
  program is traced once more with a symbol in its place, which each call reads as it reads sizes
  (`trace/numbers/symbols.py`).
- **Numbers that are read off tensors** (`self.loss = loss.item()`) are read once the call has run; a number
  that the program finds in their place is a counter, so that the next call fits.
- **Setup flags**, which only record that something was set up, are tried with the value that the next call
  will find; if the program is the same, it is compiled for that value (`assumptions.py`).
- **Changes in the backward** by hooks, autograd functions and checkpoints are a log of their own, repeated
  after every backward (`capture/in_backward.py`):
    - A backward finds other numbers than its forward left, so these are other symbols, and a number counts as
      a counter only if the difference is known.
    - A place that the program may read has to hold what it held in the backward at capture.
    - If a backward finds another object in the place of one that it changes, the call has another signature.
    - Tensors that it keeps are results of the backward graph (role `kept`), separately for each choice of
      results.
- **`.grad`**: the gradients that inputs have when the call begins become inputs if the program reads them
  (`trace/capture_mode.py`).

`print`, and loggers that the user's code calls, are noted (`capture/prints.py`): tensors that they get become
outputs, and every call prints, in order, when it has run; those in a backward are among its changes. Other
side effects in Python happen only at capture. If a program leaves an object (`self.cache = Cache()`), it is
traced once more with that; if it is another program then, the first artifact is for the call at hand only.

What a program reads of an input besides its data is part of the signature: attributes of tensors by name, and
what autograd knows (`is_leaf`, `_version`, whether there is a `grad_fn` or a `grad`). So are the values of
context variables, weak references, the environment and NumPy arrays (`capture/readers.py`). A NumPy array
that becomes a tensor is read through that tensor instead.
"""
