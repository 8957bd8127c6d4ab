"""What every Quire service needs and none owns: settings, logs, health, servers, errors."""
