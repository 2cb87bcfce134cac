"""Plan templates (paper section 5.1), one algorithm a file, parameterised by ranks, shapes, split.

What all of them take:
  num_ranks: ranks that take part, numbered from 0.
  dtype: element type, one of ``ir.plan.ITEM_SIZES`` or a NumPy or JAX dtype of such a name.
  axis: the axis that is sharded; negative ones count from the last.
  split_axis: the axis along which pieces are cut; ``axis`` if None.
  tensor, out: names of the tensors, which an axis map binds to a kernel's operands.
  name: of the plan, and of the template in messages; the template's if None.
  channel: port that the operations use, as in ``ir.topology``.

Each raises InputError for an argument of another type than its annotation (``argument_types``).
"""
