"""Report runs to Weights & Biases, MLflow, Trackio and TensorBoard: `train --report-to`.

Each is a class of its own module, registered by its name under `meshwright.trackers`, with an extra that
installs its library. The thread, the queue and the names of the figures are the core's (`api/_reporting.py`).
Imports: `api` (its records), `extras`. Used by: `api`, by the entry points.
"""
