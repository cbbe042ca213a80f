BEGIN TRANSACTION;
CREATE TABLE answer (
	problem_id INTEGER NOT NULL, 
	payload TEXT NOT NULL, 
	PRIMARY KEY (problem_id), 
	FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE
);
INSERT INTO "answer" VALUES(1,'[[{"ConvA":1},{"deterministic":true},1048576,"search",true,"2026-01-01T00:00:02.000000Z","a24269acf7bf068d7f6a1b03f75b9626"],[{"ConvA":1,"ConvB":1},{},null,"defaults",true,"2026-01-01T00:00:01.000000Z","2cf43b9b95b3dcf2d2a686e5c5e40a59"]]
["ConvA",1,"{\"tile\":64}","ok","direct","plain","ab12","cd34","",0.5,0.45,0.48,0.55,45,"cuda-1",0,true,1.5e-07,"ce1d2f15a4cff435","2026-01-01T00:00:02.000000Z","95deefd412b4f8e05605d0686eb085ae"]
["ConvA",1,"{\"tile\":128}","ok","","","","","",2.0,null,null,null,0,"",4096,false,null,"bb0ea816841f3244","2026-01-01T00:00:01.000000Z","25c8efd995eb83d8e220d1cc47ac6b10"]');
INSERT INTO "answer" VALUES(2,'[]
["ConvC",1,"{}","cut_off","","","","","",3.0,null,null,null,0,"",0,true,null,"","2026-01-01T00:00:03.000000Z","1093dba8c4af82f20595162235198e7e"]');
CREATE TABLE device (
	id INTEGER NOT NULL, 
	identity VARCHAR NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (identity)
);
INSERT INTO "device" VALUES(1,'NVIDIA H200|132|9.0|');
INSERT INTO "device" VALUES(2,'cpu|2||');
CREATE TABLE environment (
	id VARCHAR NOT NULL, 
	versions TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "environment" VALUES('bb0ea816841f3244','{"driver":"13.0","nvrtc":"13.0.88"}');
INSERT INTO "environment" VALUES('ce1d2f15a4cff435','{"driver":"13.1"}');
CREATE TABLE measurement (
	problem_id INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	solver_id VARCHAR NOT NULL, 
	solver_version BIGINT NOT NULL, 
	config TEXT NOT NULL, 
	status VARCHAR NOT NULL, 
	algorithm VARCHAR NOT NULL, 
	library VARCHAR NOT NULL, 
	source_hash VARCHAR NOT NULL, 
	kernel_hash VARCHAR NOT NULL, 
	message TEXT NOT NULL, 
	time_ms FLOAT, 
	min_ms FLOAT, 
	p20_ms FLOAT, 
	p80_ms FLOAT, 
	samples BIGINT NOT NULL, 
	protocol VARCHAR NOT NULL, 
	workspace_bytes BIGINT NOT NULL, 
	deterministic BOOLEAN NOT NULL, 
	max_error FLOAT, 
	environment VARCHAR NOT NULL, 
	created_at VARCHAR NOT NULL, 
	PRIMARY KEY (problem_id, id), 
	FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE
)
 WITHOUT ROWID

;
INSERT INTO "measurement" VALUES(1,'25c8efd995eb83d8e220d1cc47ac6b10','ConvA',1,'{"tile":128}','ok','','','','','',2.0,NULL,NULL,NULL,0,'',4096,0,NULL,'bb0ea816841f3244','2026-01-01T00:00:01.000000Z');
INSERT INTO "measurement" VALUES(1,'95deefd412b4f8e05605d0686eb085ae','ConvA',1,'{"tile":64}','ok','direct','plain','ab12','cd34','',0.5,0.45,0.48,0.55,45,'cuda-1',0,1,1.5e-07,'ce1d2f15a4cff435','2026-01-01T00:00:02.000000Z');
INSERT INTO "measurement" VALUES(1,'ac46145641ed3e75d9212699bb79d268','ConvA',1,'{"tile":64}','ok','direct','plain','ab12','cd34','',1.0,0.9,0.95,1.1,45,'cuda-1',0,1,1.5e-07,'bb0ea816841f3244','2026-01-01T00:00:01.000000Z');
INSERT INTO "measurement" VALUES(1,'fee631958b3b4e45a815df6b9ecf71be','ConvB',1,'{}','crashed','','','','','it fell over',NULL,NULL,NULL,NULL,0,'',0,1,NULL,'bb0ea816841f3244','2026-01-01T00:00:01.000000Z');
INSERT INTO "measurement" VALUES(2,'1093dba8c4af82f20595162235198e7e','ConvC',1,'{}','cut_off','','','','','',3.0,NULL,NULL,NULL,0,'',0,1,NULL,'','2026-01-01T00:00:03.000000Z');
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','1');
CREATE TABLE problem (
	id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	network_config VARCHAR NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (device_id, network_config), 
	FOREIGN KEY(device_id) REFERENCES device (id)
);
INSERT INTO "problem" VALUES(1,1,'2d-fwd-n32-c64-h56x56-k64-y3x3-pad1x1');
INSERT INTO "problem" VALUES(2,2,'1d-fwd-n1');
CREATE TABLE recheck (
	device VARCHAR NOT NULL, 
	network_config VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	created_at VARCHAR NOT NULL, 
	PRIMARY KEY (device, network_config, reason)
)
 WITHOUT ROWID

;
INSERT INTO "recheck" VALUES('NVIDIA H200|132|9.0|','2d-fwd-n32-c64-h56x56-k64-y3x3-pad1x1','measured with other versions','2026-01-01T00:00:04.000000Z');
CREATE TABLE scope (
	problem_id INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	solvers TEXT NOT NULL, 
	filters TEXT NOT NULL, 
	workspace_limit_bytes BIGINT, 
	effort VARCHAR NOT NULL, 
	complete BOOLEAN NOT NULL, 
	created_at VARCHAR NOT NULL, 
	PRIMARY KEY (problem_id, id), 
	FOREIGN KEY(problem_id) REFERENCES problem (id) ON DELETE CASCADE
)
 WITHOUT ROWID

;
INSERT INTO "scope" VALUES(1,'2cf43b9b95b3dcf2d2a686e5c5e40a59','{"ConvA":1,"ConvB":1}','{}',NULL,'defaults',1,'2026-01-01T00:00:01.000000Z');
INSERT INTO "scope" VALUES(1,'a24269acf7bf068d7f6a1b03f75b9626','{"ConvA":1}','{"deterministic":true}',1048576,'search',1,'2026-01-01T00:00:02.000000Z');
COMMIT;
