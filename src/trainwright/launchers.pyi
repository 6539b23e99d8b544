from trainwright.launch.notebook import debug_launcher as debug_launcher
from trainwright.launch.notebook import notebook_launcher as notebook_launcher
