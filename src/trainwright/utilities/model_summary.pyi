from trainwright.callbacks.model_summary import LayerSummary as LayerSummary
from trainwright.callbacks.model_summary import summarize as summarize
