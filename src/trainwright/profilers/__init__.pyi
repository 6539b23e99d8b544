from trainwright.profilers.advanced import AdvancedProfiler as AdvancedProfiler
from trainwright.profilers.profiler import PROFILERS as PROFILERS
from trainwright.profilers.profiler import PassThroughProfiler as PassThroughProfiler
from trainwright.profilers.profiler import Profiler as Profiler
from trainwright.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
from trainwright.profilers.simple import SimpleProfiler as SimpleProfiler
