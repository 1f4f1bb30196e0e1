-- JSON columns hold what model.py holds as mappings and tuples. Times are ISO 8601 in UTC, durations seconds.

CREATE TABLE source (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    locator TEXT NOT NULL,
    revision TEXT,
    terms TEXT,
    attribution TEXT,
    verified_on TEXT
) STRICT;

CREATE TABLE operation (
    id INTEGER PRIMARY KEY,
    slug TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    name TEXT NOT NULL,
    family TEXT,
    axes TEXT NOT NULL,
    tensors TEXT NOT NULL,
    semantics TEXT,
    reference TEXT
) STRICT;

CREATE TABLE workload (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    operation INTEGER NOT NULL REFERENCES operation,
    name TEXT NOT NULL,
    axes TEXT NOT NULL,
    parameters TEXT NOT NULL,
    correctness TEXT NOT NULL
) STRICT;
CREATE INDEX workload_of_operation ON workload (operation);

CREATE TABLE protocol (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    harness TEXT,
    version TEXT,
    details TEXT NOT NULL
) STRICT;

CREATE TABLE environment (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    device TEXT,
    arch TEXT,
    threads INTEGER,
    versions TEXT NOT NULL,
    facts TEXT NOT NULL
) STRICT;
CREATE INDEX environment_device ON environment (device);

-- One row a revision. The columns from licence_concluded on are computed from the findings of its files.
CREATE TABLE implementation (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    slug TEXT NOT NULL,
    revision INTEGER NOT NULL,
    supersedes INTEGER REFERENCES implementation,
    current INTEGER NOT NULL CHECK (current IN (0, 1)),
    name TEXT NOT NULL,
    operation INTEGER REFERENCES operation,
    language TEXT,
    framework TEXT,
    entry_point TEXT,
    signature TEXT,
    tensors TEXT NOT NULL,
    origin TEXT NOT NULL CHECK (origin IN ('human', 'model', 'unknown')),
    licence TEXT,
    package TEXT,
    import_path TEXT,
    limitations TEXT NOT NULL,
    source INTEGER NOT NULL REFERENCES source,
    record TEXT,
    imported_at TEXT NOT NULL,
    licence_concluded TEXT,
    licence_reason TEXT NOT NULL DEFAULT '',
    may_show INTEGER NOT NULL DEFAULT 0 CHECK (may_show IN (0, 1)),
    shown_under TEXT,
    UNIQUE (slug, revision)
) STRICT;
CREATE UNIQUE INDEX implementation_current ON implementation (slug) WHERE current;
CREATE INDEX implementation_of_operation ON implementation (operation, language, framework) WHERE current;
CREATE INDEX implementation_of_language ON implementation (language, framework) WHERE current;
CREATE INDEX implementation_of_source ON implementation (source, record);
CREATE INDEX implementation_supersedes ON implementation (supersedes) WHERE supersedes IS NOT NULL;

CREATE TABLE author (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE implementation_author (
    implementation INTEGER NOT NULL REFERENCES implementation,
    position INTEGER NOT NULL,
    author INTEGER NOT NULL REFERENCES author,
    PRIMARY KEY (implementation, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX implementation_by_author ON implementation_author (author, implementation);

-- content: the raw bytes, compressed by zlib. sha256 is that of the raw bytes.
CREATE TABLE file (
    id INTEGER PRIMARY KEY,
    sha256 TEXT NOT NULL UNIQUE,
    size INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    content BLOB NOT NULL
) STRICT;

-- What the rules found in a file when read as media_type. versions is NULL until it has been read.
CREATE TABLE scan (
    id INTEGER PRIMARY KEY,
    file INTEGER NOT NULL REFERENCES file,
    media_type TEXT NOT NULL,
    versions TEXT,
    problem TEXT,
    UNIQUE (file, media_type)
) STRICT;
CREATE INDEX scan_versions ON scan (versions);

CREATE TABLE implementation_file (
    implementation INTEGER NOT NULL REFERENCES implementation,
    path TEXT NOT NULL,
    scan INTEGER NOT NULL REFERENCES scan,
    PRIMARY KEY (implementation, path)
) STRICT, WITHOUT ROWID;
CREATE INDEX implementation_with_file ON implementation_file (scan, implementation);

-- What was found in a file: techniques, requirements, licences, third parties. body holds the finding as JSON.
CREATE TABLE finding (
    id INTEGER PRIMARY KEY,
    scan INTEGER NOT NULL REFERENCES scan,
    topic TEXT NOT NULL CHECK (topic IN ('technique', 'requirement', 'licence', 'third party')),
    line INTEGER,
    body TEXT NOT NULL
) STRICT;
CREATE INDEX finding_of_scan ON finding (scan, topic, line);

-- How often the files of a current implementation use a technique, and how often they only mention it.
CREATE TABLE implementation_technique (
    technique TEXT NOT NULL,
    implementation INTEGER NOT NULL REFERENCES implementation,
    uses INTEGER NOT NULL,
    mentions INTEGER NOT NULL,
    PRIMARY KEY (technique, implementation)
) STRICT, WITHOUT ROWID;
CREATE INDEX implementation_techniques ON implementation_technique (implementation, uses);

-- Facts of a revision as its source gives them. Those read from its files are findings of topic "requirement".
CREATE TABLE compat (
    id INTEGER PRIMARY KEY,
    implementation INTEGER NOT NULL REFERENCES implementation,
    kind TEXT NOT NULL CHECK (kind IN ('declared', 'required', 'compiled', 'measured', 'refused')),
    gpu TEXT,
    arch TEXT,
    needs TEXT,
    reason TEXT,
    path TEXT,
    line INTEGER,
    claimed INTEGER NOT NULL CHECK (claimed IN (0, 1))
) STRICT;
CREATE UNIQUE INDEX compat_of_implementation ON compat (
    implementation, kind, ifnull(gpu, ''), ifnull(arch, ''), ifnull(needs, ''), ifnull(reason, ''), ifnull(path, ''),
    ifnull(line, 0), claimed
);
CREATE INDEX compat_gpu ON compat (gpu, kind, implementation) WHERE gpu IS NOT NULL;
CREATE INDEX compat_arch ON compat (arch, kind, implementation) WHERE arch IS NOT NULL;

CREATE TABLE claim (
    id INTEGER PRIMARY KEY,
    implementation INTEGER NOT NULL REFERENCES implementation,
    subject TEXT NOT NULL,
    value TEXT NOT NULL,
    line INTEGER
) STRICT;
CREATE UNIQUE INDEX claim_of_implementation ON claim (implementation, subject, value, ifnull(line, 0));

-- device and seconds repeat the environment's device and the figure that ranks, for the index by cohort.
-- samples: seconds as little-endian 64-bit floats.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    implementation INTEGER NOT NULL REFERENCES implementation,
    operation INTEGER NOT NULL REFERENCES operation,
    workload INTEGER REFERENCES workload,
    protocol INTEGER NOT NULL REFERENCES protocol,
    environment INTEGER NOT NULL REFERENCES environment,
    status TEXT NOT NULL,
    claimed INTEGER NOT NULL CHECK (claimed IN (0, 1)),
    reason TEXT,
    observed_at TEXT,
    samples BLOB,
    floor REAL,
    error REAL,
    hardened INTEGER NOT NULL CHECK (hardened IN (0, 1)),
    beside TEXT NOT NULL,
    config TEXT NOT NULL,
    integrity TEXT NOT NULL,
    kernel_digest TEXT,
    command TEXT,
    record TEXT,
    device TEXT,
    seconds REAL
) STRICT;
CREATE INDEX run_of_implementation ON run (implementation, seconds);
CREATE INDEX run_cohort ON run (operation, workload, protocol, device, seconds);
CREATE INDEX run_of_workload ON run (workload);
-- Runs are listed newest first, of one status.
CREATE INDEX run_of_operation ON run (operation, status, observed_at);
CREATE INDEX run_of_device ON run (device, status, observed_at);
CREATE INDEX run_observed ON run (status, observed_at);

CREATE TABLE figure (
    run INTEGER NOT NULL REFERENCES run,
    position INTEGER NOT NULL,
    metric TEXT NOT NULL,
    statistic TEXT,
    value REAL NOT NULL,
    low REAL,
    high REAL,
    n INTEGER,
    PRIMARY KEY (run, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE event (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('publish', 'supersede', 'attest', 'dispute', 'refute', 'retract')),
    subject TEXT NOT NULL,
    author TEXT,
    reason TEXT,
    body TEXT NOT NULL
) STRICT;
CREATE INDEX event_subject ON event (subject, id);
CREATE TRIGGER event_is_never_changed BEFORE UPDATE ON event
BEGIN
    SELECT RAISE(ABORT, 'event: rows are only added, never changed');
END;
CREATE TRIGGER event_is_never_replaced BEFORE INSERT ON event WHEN EXISTS (SELECT 1 FROM event WHERE id = new.id)
BEGIN
    SELECT RAISE(ABORT, 'event: rows are only added, never changed');
END;
CREATE TRIGGER event_is_never_removed BEFORE DELETE ON event
BEGIN
    SELECT RAISE(ABORT, 'event: rows are only added, never removed');
END;

-- What a search looks through: a row for each current implementation. source holds each identifier of its files once,
-- where the terms allow it to be shown.
CREATE TABLE searched (
    implementation INTEGER PRIMARY KEY REFERENCES implementation,
    name TEXT NOT NULL,
    authors TEXT NOT NULL,
    operation TEXT NOT NULL,
    techniques TEXT NOT NULL,
    source TEXT NOT NULL
) STRICT;
CREATE VIRTUAL TABLE search USING fts5 (
    name, authors, operation, techniques, source,
    content = 'searched', content_rowid = 'implementation', tokenize = 'unicode61 remove_diacritics 2'
);
CREATE TRIGGER searched_added AFTER INSERT ON searched
BEGIN
    INSERT INTO search (rowid, name, authors, operation, techniques, source)
    VALUES (new.implementation, new.name, new.authors, new.operation, new.techniques, new.source);
END;
CREATE TRIGGER searched_removed AFTER DELETE ON searched
BEGIN
    INSERT INTO search (search, rowid, name, authors, operation, techniques, source)
    VALUES ('delete', old.implementation, old.name, old.authors, old.operation, old.techniques, old.source);
END;
CREATE TRIGGER searched_changed AFTER UPDATE ON searched
BEGIN
    INSERT INTO search (search, rowid, name, authors, operation, techniques, source)
    VALUES ('delete', old.implementation, old.name, old.authors, old.operation, old.techniques, old.source);
    INSERT INTO search (rowid, name, authors, operation, techniques, source)
    VALUES (new.implementation, new.name, new.authors, new.operation, new.techniques, new.source);
END;
