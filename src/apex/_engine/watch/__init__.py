"""Observers of the engine: what is said of mistakes in training loops, and of lost writes.

Without this folder, and the line of :mod:`apex.amp` that imports it, amp computes the same numbers.
"""

from __future__ import annotations

from apex._engine import events
from apex._engine.watch import mistakes, writes

events.block_begins.append(mistakes.begin_block)
events.pass_ends.append(mistakes.end_pass)
events.block_ends.append(mistakes.end_block)
events.step_begins.append(mistakes.inspect_weights)
events.gradients_used.append(mistakes.inspect_gradients)
events.other_step.append(mistakes.inspect_other_step)
events.masters_read.append(mistakes.inspect_read)
events.model_used.append(mistakes.use_model)
events.model_used.append(writes.check_average)
events.forward_begins.append(writes.watch_forward)
events.loading.append(writes.note_load)
events.converted.append(writes.log_lost)
