"""Model conversion and restoration: dtypes of parameters, inputs and outputs; fp32 state dicts."""
